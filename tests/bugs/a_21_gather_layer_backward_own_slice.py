"""A contrastive loss over the embeddings of all ranks, gathered by a custom layer. After
FAULTS C07-05 (lightly issue 1528).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, INPUTS, WIDTH, CLASSES = 9, 6, 10, 7
TEMPERATURE = 0.5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GatherLayer(torch.autograd.Function):
    """Rows of all ranks forward; backward the gradient of this rank's rows."""

    @staticmethod
    def forward(ctx, x, reduce_grad):
        ctx.reduce_grad = reduce_grad
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        if ctx.reduce_grad:
            dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()], None


class Clean:
    reduce_grad = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        first = torch.randn(ROWS, INPUTS, generator=g)
        return {"first": first, "second": first + torch.randn(ROWS, INPUTS, generator=g) / 2}

    def embed(self, model, rows):
        return (F.normalize(model(rows[k]), dim=-1) for k in ("first", "second"))

    def loss_sum(self, model, rows):
        a, b = self.embed(model, rows)
        logits = a @ b.T / TEMPERATURE
        target = torch.arange(len(a))
        loss = F.cross_entropy(logits, target, reduction="sum")
        return loss + F.cross_entropy(logits.T, target, reduction="sum"), len(a)

    def mine(self, batch, ctx):
        return {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        a, b = self.embed(model, self.mine(batch, ctx))
        all_a = GatherLayer.apply(a, self.reduce_grad)
        all_b = GatherLayer.apply(b, self.reduce_grad)
        target = ctx.rank * len(a) + torch.arange(len(a))
        loss = F.cross_entropy(a @ all_b.T / TEMPERATURE, target, reduction="sum")
        loss = loss + F.cross_entropy(b @ all_a.T / TEMPERATURE, target, reduction="sum")
        (loss / ROWS).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    reduce_grad = False


EXPECT = dict(
    right=[
        r"backward|gather|other ranks|cross|couple|input gradient|adjoint",
        r"gather|embed|head|output|model|collective|loss|rows",
    ],
    place=[r"gather|embed|head|output|loss|rank|rows"],
    wrong=[
        r"forward .{0,20}(is )?wrong",
        r"mean of (the )?means",
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
        r"micro-?batch.{0,30}(lost|dropped)",
    ],
)

WHY = (
    "The gather's backward keeps this rank's slice of its own loss and drops what the other "
    "ranks' losses say of these rows."
)
