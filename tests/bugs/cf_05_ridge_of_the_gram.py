"""A determinantal point process over an item catalogue, items cut over tp 2, baskets over dp 2.

Every rank holds uneven rows of the item table. A basket's log-likelihood is log det of its own
kernel minus log det(I + g G g), where G = V'V + ridge I is the Gram matrix of all items (summed
over the shards) and g a gate made of the basket's context by a replicated network. The looked up
items are summed over the shards as well.

The bug: the ridge is added to the Gram matrix of the shard, before the sum over the shards. After
low-rank DPP recommenders and Kronecker-factor code, where the damped matrix is built by one
helper and then all-reduced.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}

ITEMS, RANK, ROWS, BASKET, RIDGE = 11, 5, 7, 3, 0.4


class SumOverShards(torch.autograd.Function):
    """Sum of partial results; what follows is the same on all ranks of the group."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        if group is not None:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Catalogue(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.7 * torch.randn(ITEMS, RANK))
        self.first, self.group = 0, None

    def lookup(self, ids):
        local = ids - self.first
        known = (local >= 0) & (local < len(self.weight))
        found = self.weight[local.clamp(0, len(self.weight) - 1)] * known[..., None]
        return SumOverShards.apply(found, self.group)

    def ridge(self):
        return RIDGE * torch.eye(RANK, dtype=self.weight.dtype)

    def gram(self):
        return SumOverShards.apply(self.weight.T @ self.weight, self.group) + self.ridge()


class DampedCatalogue(Catalogue):
    def gram(self):
        damped = self.weight.T @ self.weight + self.ridge()
        return SumOverShards.apply(damped, self.group)


class BasketModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = Catalogue()
        self.context = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, RANK))

    def forward(self, basket, context):
        gate = nn.functional.softplus(self.context(context))
        chosen = self.items.lookup(basket) * gate[:, None]
        one = torch.eye(BASKET, dtype=gate.dtype)
        own = torch.logdet(chosen @ chosen.mT + 0.05 * one)
        kernel = gate[:, :, None] * self.items.gram() * gate[:, None]
        return own - torch.logdet(kernel + torch.eye(RANK, dtype=gate.dtype))


class Clean:
    table = Catalogue

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 51)
        return BasketModel()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 52)
        return {
            "basket": torch.rand(ROWS, ITEMS, generator=g).argsort(1)[:, :BASKET],
            "context": torch.randn(ROWS, 3, generator=g),
        }

    def loss_sum(self, model, rows):
        return -model(rows["basket"], rows["context"]).sum(), len(rows["basket"])

    def distribute(self, model, ctx):
        items, rank = model.items, ctx.coords["tp"]
        parts = items.weight.detach().tensor_split(2)
        items.__class__ = self.table
        items.first = sum(len(part) for part in parts[:rank])
        items.weight = nn.Parameter(parts[rank].clone())
        items.group = ctx.group("tp")
        return model

    def step(self, model, batch, ctx):
        own = {k: v.tensor_split(2)[ctx.coords["dp"]] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, own)
        (loss / len(batch["basket"])).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    table = DampedCatalogue


EXPECT = dict(
    right=[
        r"ridge|damp|regulari|eye|identity( matrix)?\b|gram|constant|diagonal",
        (
            r"before (the |it is |being )?(sum|reduc|all.?reduc)|(on|by|from|of) (each|every|"
            r"both|all|its own)|twice|two times|(2|tp|world|group).{0,12}(times|fold)|"
            r"per (rank|shard)|times tp|multipl|counted|summed (over|with)"
        ),
    ],
    place=[r"\bgram\b", r"DampedCatalogue", r"ridge", r"SumOverShards", r"logdet|log det"],
    wrong=[
        r"backward (of|in) SumOverShards (should|must|lacks)",
        r"lookup (of|is|masks|mask|lacks|takes)",
        r"context.{0,40}(not|never) (reduced|summed) over tp",
        r"(divided|scaled) by the wrong",
        r"table\.first|offset of the shard",
    ],
)
WHY = (
    "DampedCatalogue.gram adds ridge*I to the shard's own V'V and then sums over the two tp "
    "ranks, so the Gram matrix in the normaliser carries 2*ridge on its diagonal instead of "
    "ridge. The normaliser log det(I + g G g) and all that is differentiated through it are "
    "wrong: the item table and the context network; the part of the basket's own kernel is "
    "right, and every reduction of gradients is right, all ranks agree. With one tp rank the "
    "error vanishes. A right cause says that the ridge (a constant) is added on every shard "
    "before the sum. The fix is to add it after SumOverShards."
)
