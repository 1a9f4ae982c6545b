"""A convolutional part-of-speech tagger in two stages of torch.distributed.pipelining (1F1B), two pipelines beside each other, with
clipping at the end of the step. After FAULTS C17-11 (torchtitan issue 596) and C17-12 (Paddle PR 74080): clip_grad_norm_ sees the
parameters of the own stage alone.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 2}}}}
ROWS, LENGTH, WORDS, WIDTH, TAGS, MICRO_BATCHES = 12, 7, 23, 6, 5, 3


class Front(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, ids):
        x = self.words(ids)
        return x + torch.tanh(self.conv(x.mT).mT)


class Back(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, 8, 3, padding=1)
        self.out = nn.Linear(8, TAGS)

    def forward(self, x):
        return self.out(F.silu(self.conv(self.norm(x).mT).mT))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.front, self.back = Front(), Back()

    def forward(self, ids):
        return self.back(self.front(ids))


class Clean:
    after, max_norm = "clip", 0.05

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Tagger()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        tags = torch.randint(TAGS, (ROWS, LENGTH), generator=g)
        return {
            "ids": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
            "tags": tags.masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    @staticmethod
    def tag_loss(logits, tags):
        return F.cross_entropy(logits.flatten(0, 1), tags.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.tag_loss(model(rows["ids"]), rows["tags"]), (rows["tags"] != -100).sum()

    def distribute(self, model, ctx):
        delattr(model, "back" if ctx.coords["pp"] == 0 else "front")
        return model

    def total_norm(self, params, ctx):
        squares = sum(p.grad.square().sum() for p in params)
        dist.all_reduce(squares, group=ctx.group("pp"))
        return squares.sqrt()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        count = (batch["tags"] != -100).sum()
        first = ctx.coords["pp"] == 0
        stage = PipelineStage(
            model.front if first else model.back,
            ctx.coords["pp"],
            2,
            ctx.device,
            group=ctx.group("pp"),
        )
        schedule = Schedule1F1B(
            stage,
            MICRO_BATCHES,
            lambda out, tags: self.tag_loss(out, tags) / count,
            scale_grads=False,
        )
        if first:
            schedule.step(mine["ids"])
        else:
            schedule.step(target=mine["tags"])
        params = list(model.parameters())
        for param in params:
            dist.all_reduce(param.grad, group=ctx.group("dp"))
        factor = (self.max_norm / (self.total_norm(params, ctx) + 1e-6)).clamp(max=1)
        for param in params:
            param.grad *= factor


class Buggy(Clean):
    def total_norm(self, params, ctx):
        return torch.stack([p.grad.norm() for p in params]).norm()


EXPECT = dict(
    right=[
        r"clip|norm of|global norm|total norm|max_norm",
        r"stage|\bpp\b|pipeline|own|local|each rank|not (reduced|summed)|per.?rank|differ\w*|part of|front|back|factor|unlike|ranks",
    ],
    place=[
        r"stage",
        r"\bpp\b",
        r"front",
        r"back",
        r"ranks? \W?[0-3]",
        r"all parameters|every parameter",
    ],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced over (the )?dp",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (wrong|different)",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
        r"(counted|reduced|summed) (twice|again)",
    ],
)
WHY = (
    "The gradients are right until the clip; then each stage divides by the norm of its own parameters instead of that of both stages, "
    "so front.* (ranks 0 and 2) and back.* (ranks 1 and 3) are too large, each by one factor of its own, total norm / stage norm."
)
