"""Text rows, some with an image, under a hand-written all-reduce that skips unused parameters.
After FAULTS class C14 (unused parameters of multimodal batches).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, INPUTS, PIXELS, WIDTH, CLASSES = 9, 5, 7, 8, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.text = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        self.vision = nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, pixels, has_image):
        hidden = self.text(x)
        at = torch.nonzero(has_image)[:, 0]
        if len(at):
            hidden = hidden.index_add(0, at, self.vision(pixels[at]))
        return self.head(hidden)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "pixels": torch.randn(ROWS, PIXELS, generator=g),
            "has_image": torch.arange(ROWS) % 4 == 3,
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["x"], rows["pixels"], rows["has_image"])
        return F.cross_entropy(logits, rows["y"], reduction="sum"), len(rows["x"])

    def mine(self, batch, ctx):
        return {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        loss, _ = self.loss_sum(model, self.mine(batch, ctx))
        (loss / ROWS).backward()
        params = list(model.parameters())
        used = torch.tensor([param.grad is not None for param in params]).int()
        self.agree(used)
        for param, reduced in zip(params, used.tolist(), strict=True):
            if reduced:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                dist.all_reduce(param.grad)

    def agree(self, used):
        dist.all_reduce(used, op=dist.ReduceOp.MAX)


class Buggy(Clean):
    def agree(self, used):
        dist.broadcast(used, src=0)


EXPECT = dict(
    right=[
        (
            r"not reduced|never reduced|not summed|never summed|missing.{0,40}(reduc|sum)"
            r"|unreduced|without (a |the |any )?(reduc|all.?reduce|sum)|own (part|share|rows"
            r"|contribution)|partial|no (reduc|all.?reduce|collective)|lacks? .{0,60}(rank"
            r"|part|sum|reduc)|only (its|their|the) own|(reduction|all.?reduce"
            r"|sum).{0,40}(missing|left out|skipped|absent)|stays? local|local to (each|its)"
            r"|out of the reduc|no gradient|missing gradient|(gradient|grad).{0,20}(is )?None"
            r"|local"
        ),
        r"vision",
    ],
    place=[r"vision"],
    wrong=[
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
        r"mean of (the )?means",
        r"(text|head)\.[a-z0-9.]+ .{0,30}not reduced",
    ],
)

WHY = (
    "Rank 0 has no row with an image, so its list of used parameters leaves the vision tower "
    "out of the reduction on all ranks."
)
