"""Two pipeline stages with torch.distributed.pipelining (ScheduleGPipe, three micro-batches of two rows): embedding and an attention block, then a second block and the head. The distance slopes of the three heads (ALiBi) are handed to
every stage as a keyword of schedule.step. Loss sum / all tokens, stage gradients summed over pp.

The bug: no kwargs_chunk_spec is given, so the schedule splits every tensor keyword along dimension 0, and the slopes, one per head, are dealt out to the micro-batches like rows: micro-batch m gets the slope of head m alone, which
broadcasts to all heads. Number of heads = number of micro-batches, so no shape complains. As in pytorch/torchtitan PR 4098 (varlen offsets chunked by the default TensorChunkSpec(0)) and NVIDIA-NeMo/Automodel PR 3208 (mRoPE axes).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.microbatch import _Replicate
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2}}}}
ROWS, TOKENS, VOCABULARY, WIDTH, HEADS, MICRO = 6, 5, 9, 6, 3, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, slopes):
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        place = torch.arange(x.shape[1], device=x.device)
        distance = place[:, None] - place[None, :]
        bias = -slopes.to(x.dtype)[:, None, None] * distance.to(x.dtype)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
        p = scores.masked_fill(distance < 0, float("-inf")).softmax(-1)
        return x + self.out((p @ v).transpose(1, 2).flatten(2))


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCABULARY, WIDTH), Block()

    def forward(self, ids, slopes):
        return self.block(self.embed(ids), slopes)


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x, slopes):
        return self.head(self.block(x, slopes))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = First(), Second()

    def forward(self, ids, slopes):
        return self.second(self.first(ids, slopes), slopes)


def slopes_of_heads():
    return torch.tensor([2.0, 0.5, 0.05])


def token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Clean:
    spec = {"slopes": _Replicate()}

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
        }

    def loss_sum(self, model, rows):
        return token_loss(model(rows["ids"], slopes_of_heads()), rows["labels"]), rows[
            "labels"
        ].numel()

    def step(self, model, batch, ctx):
        group = ctx.group("pp")
        stage = PipelineStage(
            model.second if ctx.rank else model.first, ctx.rank, 2, torch.device("cpu"), group=group
        )
        schedule = ScheduleGPipe(
            stage,
            MICRO,
            loss_fn=lambda logits, labels: token_loss(logits, labels) / (ROWS * TOKENS),
            kwargs_chunk_spec=self.spec,
            scale_grads=False,
        )
        if ctx.rank == 0:
            schedule.step(batch["ids"], slopes=slopes_of_heads())
        else:
            schedule.step(target=batch["labels"], losses=[], slopes=slopes_of_heads())
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    spec = None


EXPECT = dict(
    right=[
        r"(?i)slopes?|keyword|kwarg|attention|block|scores|heads?",
        r"(?i)micro.?batch|chunk|split|dealt|piece|own (part|slice)",
        r"(?i)forward|input|split|chunk|slice|other|wrong|differs?",
    ],
    place=[r"(?i)slopes?|kwarg|keyword|(first|second)\.block|block"],
    wrong=[
        r"(?i)forward is right|wrong only in the backward|(adjoint|backward) (of|is) .{0,20}(wrong|missing)",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)only (on )?(rank|stage) [01]\b|(rank|stage) [01] alone",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|swapped)|only the last micro.?batch",
        r"(?i)labels? .{0,20}(is|are) (wrong|of another)|embed.{0,20}(output|forward) .{0,15}wrong",
    ],
)
WHY = (
    "ScheduleGPipe without kwargs_chunk_spec chunks `slopes` (3 heads) along dimension 0 into 3 micro-batches: micro-batch 0 has slope 2.0, micro-batch 1 slope 0.5, micro-batch 2 slope 0.05, each for all three heads. So in both stages "
    "(first.block and second.block, ranks 0 and 1) and in all micro-batches the attention scores of two of three heads have another head's distance bias: in micro-batch m only head m is right. The embedding's output, ids, "
    "labels, the hand-over of activations and gradients, the "
    "divisor 30 and the sum over pp are right. All parameters get wrong gradients (direction), since the forward is wrong from first.block's attention on. Fix: kwargs_chunk_spec with slopes replicated."
)
