"""A flat gradient bucket, reduce-scattered and gathered back in equal chunks, ZeRO-style.
After FAULTS C12-14: what does not fill a chunk at the bucket's end is never sent."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
ROWS, WIDTH, HIDDEN, CLASSES = 11, 9, 13, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.randn(6) / 4 + 1)

    def forward(self, x):
        parts = self.head(self.norm(self.blocks(self.stem(x))))
        return torch.cat([parts, parts[:, :1]], dim=1) * self.scale


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, 4, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["x"])

    def chunk(self, numel, size):
        return -(-numel // size)  # rounded up, the end is padded

    def step(self, model, batch, ctx):
        size = ctx.axes["dp"]
        mine = {k: v.tensor_split(size)[ctx.rank] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / ROWS).backward()
        params = [p for n, p in model.named_parameters() if n != "scale"] + [model.scale]
        flat = torch.cat([p.grad.flatten() for p in params])
        chunk = self.chunk(flat.numel(), size)
        padded = F.pad(flat, (0, max(0, chunk * size - flat.numel())))
        used = padded[: chunk * size]
        own = torch.empty(chunk, dtype=flat.dtype)
        dist.reduce_scatter_tensor(own, used.clone())
        dist.all_gather_into_tensor(used, own)
        for param, grad in zip(
            params, padded[: flat.numel()].split([p.numel() for p in params]), strict=True
        ):
            param.grad.copy_(grad.view_as(param))


class Buggy(Clean):
    def chunk(self, numel, size):
        return numel // size


EXPECT = dict(
    right=[
        r"scale",
        r"not (summed|reduced)|never (summed|reduced)|missing.*(reduc|sum)|own (part|share)|partial"
        r"|unreduced|lacks?.*(reduc|sum)|own rows|left out|elements?",
    ],
    place=[r"\bscale\b"],
    wrong=[r"averag", r"counted twice", r"\bforward (is )?wrong", r"blocks\.\d\S* (is|are) wrong"],
)
WHY = (
    "The bucket is cut into numel // 4 elements per rank; the remainder, the last elements of "
    "`scale`, is never reduced and keeps each rank's own part."
)
