"""The contact head of a protein language model (ESM): pairwise attention scores are symmetrised, corrected by the average product (APC: s_ij - s_i. s_.j / s_..) and put through a logistic regression over the heads. The
eleven residues are cut over three ranks (4, 4 and 3), each has its own rows of the maps; keys and queries of all residues are gathered, column sums and the total are summed over the ranks. All ranks see all proteins, two
micro-batches, gradients summed over the ranks.

The bug: the total s_.. is the sum of the row sums at hand, as in the library's apc(x): a12 = a1.sum(), with a1 of the own strip alone; the column sums are reduced. After ESM's apc() put under
sequence/row parallelism (FastFold-like ports).
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
PROTEINS, LENGTH, FEATURES, WIDTH, HEADS = 5, 11, 6, 4, 3


class ContactModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(FEATURES, 8)
        self.query = nn.Linear(8, HEADS * WIDTH)
        self.key = nn.Linear(8, HEADS * WIDTH)
        self.regression = nn.Linear(HEADS, 1)

    def heads(self, x):
        h = torch.tanh(self.enter(x))
        return self.query(h).unflatten(-1, (HEADS, WIDTH)), self.key(h).unflatten(
            -1, (HEADS, WIDTH)
        )

    def maps(self, q, k, q_all, k_all):
        """Symmetrised scores of own rows with all residues: [proteins, rows, residues, heads]."""
        one = torch.einsum("bihd,bjhd->bijh", q, k_all)
        other = torch.einsum("bihd,bjhd->bijh", k, q_all)
        return F.softplus(2 * one) + F.softplus(2 * other)


class GatherResidues(torch.autograd.Function):
    """The residues of all ranks; each rank does something else with them, so gradients are summed."""

    @staticmethod
    def forward(fctx, own, lo, hi, group):
        fctx.place, fctx.group = slice(lo, hi), group
        full = own.new_zeros(own.shape[0], LENGTH, *own.shape[2:])
        full[:, lo:hi] = own
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad[:, fctx.place], None, None, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return ContactModel()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        upper = (torch.rand(PROTEINS, LENGTH, LENGTH, generator=g) < 0.3).float().triu(2)
        return {
            "x": torch.randn(PROTEINS, LENGTH, FEATURES, generator=g),
            "contacts": upper + upper.transpose(1, 2),
        }

    def loss_sum(self, model, rows):
        q, k = model.heads(rows["x"])
        s = model.maps(q, k, q, k)
        a1, a2 = s.sum(2, keepdim=True), s.sum(1, keepdim=True)
        s = s - a1 * a2 / a1.sum(1, keepdim=True)
        logits = model.regression(s).squeeze(-1)
        return F.binary_cross_entropy_with_logits(logits, rows["contacts"], reduction="sum"), len(s)

    def apc(self, s, group):
        a1 = s.sum(2, keepdim=True)
        a2 = dnn.all_reduce(s.sum(1, keepdim=True), group=group)
        a12 = a2.sum(2, keepdim=True)
        return s - a1 * a2 / a12

    def step(self, model, batch, ctx):
        group = ctx.group("sp")
        own = torch.arange(LENGTH).tensor_split(ctx.world_size)[ctx.rank]
        lo, hi = int(own[0]), int(own[-1]) + 1
        for n in range(2):
            rows = {key: v.tensor_split(2)[n] for key, v in batch.items()}
            q, k = model.heads(rows["x"][:, lo:hi])
            q_all = GatherResidues.apply(q, lo, hi, group)
            k_all = GatherResidues.apply(k, lo, hi, group)
            logits = model.regression(self.apc(model.maps(q, k, q_all, k_all), group)).squeeze(-1)
            contacts = rows["contacts"][:, lo:hi]
            loss = F.binary_cross_entropy_with_logits(logits, contacts, reduction="sum")
            (loss / PROTEINS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def apc(self, s, group):
        a1 = s.sum(2, keepdim=True)
        a2 = dnn.all_reduce(s.sum(1, keepdim=True), group=group)
        a12 = a1.sum(1, keepdim=True)
        return s - a1 * a2 / a12


EXPECT = dict(
    right=[
        r"total|a12|statistic|sum|normalis|normaliz|apc|average product|denominator",
        r"own|local|not (reduced|summed)|missing|strip|shard|partial|each rank|per rank|a1\b|without (all.?)?reduc|over (its|their)",
    ],
    place=[r"\bapc\b|average product", r"a12|\btotal\b", r"\ba1\b|row sums", r"all_reduce|dnn"],
    wrong=[
        r"(parameters?|regression|query|key|enter)[^.]{0,40}(not reduced|reduced twice|never reduced)|wrong group",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|mean of means",
        r"GatherResidues.{0,60}(wrong|missing|twice)|(reduced|counted|summed) (twice|again)",
        r"detached|no gradient|(wrong|other) (rows|labels|proteins)|mask",
    ],
)
WHY = (
    "a12 has to be the sum over all 11 x 11 pairs of a map; the Buggy apc takes the row sums of the own 4 or 3 rows only, so that it is about 4/11 or 3/11 of the total, other on each rank, and the correction a1 a2 / a12 is about "
    "three times too large. Logits, loss and gradients of all parameters are wrong on all three ranks; column sums, gathers and the final reduction are right. A right cause says that a statistic (the total a12) in apc is that "
    "of the own strip, not summed over the ranks. Fix: the sum of the reduced column sums."
)
