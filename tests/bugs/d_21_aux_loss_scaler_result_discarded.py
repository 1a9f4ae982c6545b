"""MoE whose experts are tensor parallel DTensors; the router's z-loss is attached by an autograd
wrapper. After FAULTS C10-07 (Automodel issue 1408): what the wrapper returns is not used.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}

ROWS, LENGTH, WIDTH, HIDDEN, EXPERTS, VOCABULARY, Z = 9, 4, 8, 6, 3, 12, 0.15


class AuxLossAutoScaler(torch.autograd.Function):
    """Passes the output on; the backward gives the auxiliary loss its own gradient."""

    @staticmethod
    def forward(ctx, output, aux):
        ctx.save_for_backward(aux)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):
        (aux,) = ctx.saved_tensors
        return grad, torch.ones_like(aux)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Moe(nn.Module):
    tokens = None  # of the global batch, while the z-loss is to be attached here

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        logits = self.router(x)
        self.z = logits.logsumexp(-1).square().sum()
        gates = logits.softmax(-1)
        if self.tokens is not None:
            gates = self.attach(gates, Z * self.z / self.tokens)
        return sum(gates[..., e, None] * expert(x) for e, expert in enumerate(self.experts))

    def attach(self, gates, aux):
        return AuxLossAutoScaler.apply(gates, aux)


class MoeDiscards(Moe):
    def attach(self, gates, aux):
        AuxLossAutoScaler.apply(gates, aux)
        return gates


class Block(nn.Module):
    def __init__(self, moe):
        super().__init__()
        self.norm1, self.mix = nn.LayerNorm(WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm2, self.moe = nn.LayerNorm(WIDTH), moe()

    def forward(self, x):
        x = x + self.mix(self.norm1(x))[0]
        return x + self.moe(self.norm2(x))


class Model(nn.Module):
    def __init__(self, moe):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(moe) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Clean:
    moe = Moe

    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"lm": self.lm_sum, "z": self.z_sum}

    def build(self):
        torch.manual_seed(self.seed)
        return Model(self.moe)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
        }

    def lm_sum(self, model, rows):
        logits, labels = model(rows["ids"]).flatten(0, 1), rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()

    def z_sum(self, model, rows):
        model(rows["ids"])
        return Z * sum(block.moe.z for block in model.blocks), rows["ids"].numel()

    def loss_sum(self, model, rows):
        loss, n = self.lm_sum(model, rows)
        return loss + Z * sum(block.moe.z for block in model.blocks), n

    def distribute(self, model, ctx):
        for block in model.blocks:
            for expert in block.moe.experts:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(expert, ctx.mesh["tp"], plan)
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        for block in model.blocks:
            block.moe.tokens = batch["ids"].numel()
        loss, n = self.lm_sum(model, mine)
        (loss / batch["ids"].numel()).backward()
        for block in model.blocks:
            block.moe.tokens = None
        for param in model.parameters():
            grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            dist.all_reduce(grad, group=ctx.group("dp"))


class Buggy(Clean):
    moe = MoeDiscards


EXPECT = dict(
    right=[
        r"\bz\b|z.?loss|auxiliary|\baux\b|router|term",
        r"missing|absent|zero|\b0(\.0+)?\b|no (gradient|effect|part|contribution)|lacks?|lost|left out|dropped|never"
        r"|without|not (counted|included|in|attached|added|contribut|there|present)|only (the )?(lm|main)|gone"
        r"|discard|ignored|none",
    ],
    place=[r"router", r"\bz\b", r"moe", r"term"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|two times|2 times)|reduced (twice|again)",
        r"averag|mean of (the )?means",
        r"\bforward (is )?wrong|first wrong forward|forward (pass )?(is wrong|differs)",
        r"rows? .{0,30}(lost|missing|dropped)",
        r"\blm\b (term )?(is|has) (wrong|missing|lost|dropped)",
    ],
)

WHY = (
    "The wrapper that carries the z-loss is outside the graph as its result is thrown away: the z "
    "term's gradient is missing altogether, the lm term is right."
)
