"""CLIP with cached features: every chunk is computed again with gradients and put among the cached ones. After
mlfoundations/open_clip PR 267 and issues 761 and 957 (accum_freq): each chunk's backward runs through the whole loss, so logit_scale,
which belongs to no chunk, gets its whole gradient each time.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"clip": {"axes": {"dp": 2}}}}
ROWS, WIDTH, WORDS, LENGTH, CHUNKS = 13, 6, 17, 5, 3


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(2, 8, 2, stride=2)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.proj = nn.LayerNorm(8), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = self.norm(x + self.attend(x, x, x, need_weights=False)[0])
        return F.normalize(self.proj(x.mean(1)), dim=-1)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.hidden = nn.Embedding(WORDS, 7), nn.Linear(7, 9)
        self.proj = nn.Linear(9, WIDTH, bias=False)

    def forward(self, ids):
        return F.normalize(self.proj(F.gelu(self.hidden(self.embed(ids))).mean(1)), dim=-1)


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision, self.words = Vision(), Words()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(5.0)))

    @staticmethod
    def loss_of(a, b, log_scale):
        logits, target = log_scale.exp() * a @ b.T, torch.arange(len(a))
        return sum(F.cross_entropy(x, target, reduction="sum") for x in (logits, logits.T)) / 2


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return CLIP()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(ROWS, 2, 4, 4, generator=g),
            "text": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows):
        a, b = model.vision(rows["image"]), model.words(rows["text"])
        return model.loss_of(a, b, model.logit_scale), len(a)

    def log_scale(self, model, chunk):
        """A parameter outside the chunks takes its gradient from one of the backwards."""
        return model.logit_scale if chunk == CHUNKS - 1 else model.logit_scale.detach()

    def step(self, model, batch, ctx):
        chunks = {k: [c for part in v.tensor_split(ctx.world_size) for c in part.tensor_split(CHUNKS)]
                  for k, v in batch.items()}  # fmt: skip
        first = ctx.rank * CHUNKS
        with torch.no_grad():
            a = [model.vision(x) for x in chunks["image"][first : first + CHUNKS]]
            b = [model.words(x) for x in chunks["text"][first : first + CHUNKS]]
        a, b = self.everywhere(a, chunks["image"], ctx), self.everywhere(b, chunks["text"], ctx)
        for i in range(CHUNKS):
            at = first + i
            now_a, now_b = list(a), list(b)
            now_a[at], now_b[at] = (
                model.vision(chunks["image"][at]),
                model.words(chunks["text"][at]),
            )
            loss = model.loss_of(torch.cat(now_a), torch.cat(now_b), self.log_scale(model, i))
            (loss / ROWS).backward()
        model.logit_scale.grad /= ctx.world_size  # whole on each rank
        for param in model.parameters():
            dist.all_reduce(param.grad)

    @staticmethod
    def everywhere(own, like, ctx):
        """The cached features of all ranks, in the order of rows."""
        out = []
        for at, x in enumerate(like):
            source, i = divmod(at, CHUNKS)
            feature = own[i] if source == ctx.rank else own[0].new_empty(len(x), WIDTH)
            dist.broadcast(feature, source)
            out.append(feature)
        return out


class Buggy(Clean):
    def log_scale(self, model, chunk):
        return model.logit_scale


EXPECT = dict(
    right=[
        r"logit_scale|temperature",
        r"\b3\b|three|thrice|each (chunk|micro|backward|accum)|every (chunk|micro|backward|accum)|once per (chunk|micro)|micro.?batch|chunks|times|"
        r"repeated|again|more than once",
    ],
    place=[r"logit_scale|temperature"],
    wrong=[
        r"(vision|words)\S* (is|are|has|have) (a )?wrong",
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"forward (pass )?(is|was) wrong",
        r"mean of (the )?means",
        r"\b1/3\b|a third|divided by 3",
    ],
)
WHY = (
    "logit_scale takes part in each of the 3 backwards with its whole gradient (the loss of all rows), so it counts 3 times, on both ranks "
    "alike; the encoders' gradients come chunk by chunk and are right."
)
