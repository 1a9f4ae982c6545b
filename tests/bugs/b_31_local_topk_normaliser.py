"""Top-2 routing with renormalised weights, tokens on every rank of ep, experts cut over it.
After reports on vLLM/HF expert parallel ports: the sum of weights is taken over local experts."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "ep": 2}}}}
ROWS, WIDTH, EXPERTS, CLASSES = 10, 9, 4, 5


class CopyIn(torch.autograd.Function):
    """Identity forward, SUM over the group backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOut(torch.autograd.Function):
    """SUM over the group forward, identity backward."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))


class SparseMoe(nn.Module):
    local_sum = False

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(e): Expert() for e in range(EXPERTS)})

    def forward(self, x, group=None):
        weight, chosen = (3 * self.router(x)).softmax(-1).topk(2)
        if group is not None:
            x, weight = CopyIn.apply(x, group), CopyIn.apply(weight, group)
        held = torch.tensor([int(e) for e in self.experts])
        if self.local_sum:
            weight = weight.masked_fill(~torch.isin(chosen, held), 0.0)
            weight = weight / weight.sum(-1, keepdim=True).clamp(min=1e-9)
        else:
            weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e, expert in self.experts.items():
            row, which = torch.nonzero(chosen == int(e), as_tuple=True)
            out = out.index_add(0, row, weight[row, which, None] * expert(x[row]))
        return out if group is None else SumOut.apply(out, group)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(WIDTH), SparseMoe()

    def forward(self, x, group):
        return x + self.moe(self.norm(x), group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, group=None):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, group)
        return self.head(x)


class Clean:
    local_sum = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, 6, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows, group=None):
        loss = F.cross_entropy(model(rows["x"], group), rows["y"], reduction="sum")
        return loss, len(rows["x"])

    def distribute(self, model, ctx):
        for block in model.blocks:
            block.moe.local_sum = self.local_sum
            for e in range(EXPERTS):
                if e % ctx.axes["ep"] != ctx.coords["ep"]:
                    del block.moe.experts[str(e)]
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine, ctx.group("ep"))
        (loss / ROWS).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    local_sum = True


EXPECT = dict(
    right=[r"forward|output|activation", r"moe|experts|router"],
    place=[r"blocks\.0\.moe", r"blocks\.0"],
    wrong=[r"never reduced|not reduced|missing reduction", r"counted twice", r"averag"],
)
WHY = (
    "The two routing weights are renormalised over the experts of the rank: tokens whose two "
    "experts are on different ranks get weight 1 for both; forward wrong from blocks.0.moe."
)
