"""CLIP: image and text towers, every rank scores its own rows against the gathered other side.
After open_clip reports on local_loss without gather_with_grad: negatives have no gradient."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collective
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, WIDTH, PROJECTION = 9, 10, 6


class Tower(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.stem, self.norm = nn.Linear(inputs, WIDTH), nn.LayerNorm(WIDTH)
        self.mlp, self.projection = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, PROJECTION)

    def forward(self, x):
        x = self.stem(x)
        x = x + F.gelu(self.mlp(self.norm(x)))
        return F.normalize(self.projection(x), dim=-1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual, self.text = Tower(7), Tower(5)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(ROWS, 7, generator=g),
            "text": torch.randn(ROWS, 5, generator=g),
        }

    def loss_sum(self, model, rows):
        image, text = model.visual(rows["image"]), model.text(rows["text"])
        logits, target = model.logit_scale.exp() * image @ text.T, torch.arange(len(image))
        loss = F.cross_entropy(logits, target, reduction="sum")
        return (loss + F.cross_entropy(logits.T, target, reduction="sum")) / 2, len(image)

    def gather(self, x):
        return torch.cat(collective.all_gather(x))

    def step(self, model, batch, ctx):
        mine = {k: v.chunk(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        image, text = model.visual(mine["image"]), model.text(mine["text"])
        all_image, all_text = self.gather(image), self.gather(text)
        target = ctx.rank * len(image) + torch.arange(len(image))
        scale = model.logit_scale.exp()
        loss = F.cross_entropy(scale * image @ all_text.T, target, reduction="sum")
        loss = loss + F.cross_entropy(scale * text @ all_image.T, target, reduction="sum")
        (loss / 2 / ROWS).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def gather(self, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.detach().contiguous())
        return torch.cat(parts)


EXPECT = dict(
    right=[
        r"all_?gather|visual|text|rows",
        r"detach|no gradient|without (a )?gradient|lost|missing|not sent back|backward|adjoint"
        r"|never returns",
    ],
    place=[r"all_?gather", r"visual|text"],
    wrong=[
        r"averag",
        r"counted (twice|3 times)",
        r"logit_scale (is )?wrong",
        r"forward (is )?wrong",
    ],
)
WHY = (
    "Gathered features are detached, so an embedding gets no gradient from its part as a "
    "candidate of other rows: both towers are wrong, logit_scale is right."
)
