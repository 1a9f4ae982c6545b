"""Mixture of experts with tokens on every rank and experts cut over ep, plus a shared expert.
After reports on DeepSeek-style MoE ports: the shared expert is inside the all-reduce."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"ep": 3}}}}
ROWS, LENGTH, WIDTH, EXPERTS, VOCAB = 6, 4, 8, 6, 12


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
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Moe(nn.Module):
    shared_inside = False

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(e): Expert() for e in range(EXPERTS)})
        self.shared_expert = Expert()

    def forward(self, x, group=None):
        probabilities = (3 * self.gate(x)).softmax(-1)
        weight, chosen = probabilities.topk(2)
        x_in, weight = (x, weight) if group is None else (
            CopyIn.apply(x, group), CopyIn.apply(weight, group),
        )  # fmt: skip
        out = torch.zeros_like(x)
        for e, expert in self.experts.items():
            row, which = torch.nonzero(chosen == int(e), as_tuple=True)
            out = out.index_add(0, row, weight[row, which, None] * expert(x_in[row]))
        if group is None:
            return out + self.shared_expert(x)
        if self.shared_inside:
            return SumOut.apply(out + self.shared_expert(x), group)
        return SumOut.apply(out, group) + self.shared_expert(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(WIDTH), Moe()

    def forward(self, x, group):
        return x + self.moe(self.norm(x), group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, group=None):
        x = self.embed(ids.flatten())
        for block in self.blocks:
            x = block(x, group)
        return self.head(x)


class Clean:
    shared_inside = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCAB, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCAB, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows, group=None):
        logits, labels = model(rows["ids"], group), rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()

    def distribute(self, model, ctx):
        each = EXPERTS // ctx.axes["ep"]
        for block in model.blocks:
            block.moe.shared_inside = self.shared_inside
            for e in range(EXPERTS):
                if e // each != ctx.coords["ep"]:
                    del block.moe.experts[str(e)]
        return model

    def step(self, model, batch, ctx):
        loss, count = self.loss_sum(model, batch, ctx.group("ep"))
        (loss / count).backward()


class Buggy(Clean):
    shared_inside = True


EXPECT = dict(
    right=[r"forward|output|activation", r"moe|shared_expert"],
    place=[r"blocks\.0\.moe", r"shared_expert"],
    wrong=[r"never reduced|not reduced|missing reduction", r"averag", r"detach"],
)
WHY = (
    "The shared expert's output is added on every rank before the all-reduce over ep and counts "
    "three times in the forward: outputs are wrong from blocks.0.moe on."
)
