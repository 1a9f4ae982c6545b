"""A tensor parallel layer whose weight is made by a chunked hypernetwork (one small MLP, an
embedding for each chunk of 8 weights); 3 ranks hold 3, 2 and 2 of its 7 output rows and each
makes the chunks that it needs.

The bug: the flat range of a rank's rows begins in the middle of a chunk (15 = chunk 1 + 7, 25 =
chunk 3 + 1). The rank makes the right chunks, joins them and takes the first values, as if its
range began at the chunk's beginning. After chunked hypernetworks (von Oswald et al.,
hypnettorch) split over ranks; the same slip is known from loaders of sharded checkpoint files
that read whole blocks.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
INNER, DIM, CHUNK = 7, 5, 8
ROWS = [(0, 3), (3, 5), (5, 7)]


class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class HyperNet(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.chunks = nn.Parameter(torch.randn(-(-size // CHUNK), 4))
        self.hidden = nn.Linear(4, 9)
        self.weights = nn.Linear(9, CHUNK)

    def forward(self, first, stop):
        return self.weights(torch.tanh(self.hidden(self.chunks[first:stop]))).flatten()


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, DIM)
        self.hyper = HyperNet(INNER * DIM)
        self.out = nn.Linear(INNER, 3)

    def forward(self, x):
        weight = self.hyper(0, len(self.hyper.chunks))[: INNER * DIM].view(INNER, DIM)
        return self.out(F.gelu(F.linear(torch.tanh(self.enter(x)), weight)))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 91)
        return Policy()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 92)
        return {
            "state": torch.randn(10, 6, generator=g),
            "action": torch.randint(0, 3, (10,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["state"]), rows["action"], reduction="sum"), len(
            rows["action"]
        )

    def own_weight(self, hyper, lo, hi):
        begin, end = lo * DIM, hi * DIM
        first, stop = begin // CHUNK, -(-end // CHUNK)
        flat = hyper(first, stop)
        skip = begin - first * CHUNK
        return flat[skip : skip + end - begin].view(hi - lo, DIM)

    def step(self, model, batch, ctx):
        group = ctx.group("tp")
        lo, hi = ROWS[ctx.rank]
        total = len(batch["action"])
        for state, action in zip(batch["state"].split(4), batch["action"].split(4), strict=True):
            x = CopyIn.apply(torch.tanh(model.enter(state)), group)
            inner = F.gelu(F.linear(x, self.own_weight(model.hyper, lo, hi)))
            logits = (
                SumOut.apply(F.linear(inner, model.out.weight[:, lo:hi]), group) + model.out.bias
            )
            (F.cross_entropy(logits, action, reduction="sum") / total).backward()
        for p in [*model.hyper.parameters(), model.out.weight]:
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def own_weight(self, hyper, lo, hi):
        begin, end = lo * DIM, hi * DIM
        first, stop = begin // CHUNK, -(-end // CHUNK)
        flat = hyper(first, stop)
        return flat[: end - begin].view(hi - lo, DIM)


EXPECT = dict(
    right=[
        r"chunk|hyper|generated|flat",
        r"weight|rows?|slice|range|values",
        (
            r"offset|begin|start|shift|middle|misalign|align|boundary|wrong (part|slice|range|"
            r"values|rows)|first values|inside (the|a) chunk|skip"
        ),
    ],
    place=[r"own_weight", r"hyper", r"chunk", r"\bflat\b"],
    wrong=[
        r"not (all-?)?reduced|reduced (twice|over)",
        r"last chunk|truncat|padding of the last",
        r"out\.weight|columns of out",
        r"CopyIn|input gradient|enter.*not summed",
        r"divided|averag",
    ],
)

WHY = """Rank 1's rows begin at flat position 15 and rank 2's at 25, inside chunks 1 and 3; Buggy
joins the right chunks but takes their first values, so rank 1's weight is shifted by 7
and rank 2's by 1 against the true layer, and rank 0's is right. Another function is
computed: logits and all gradients are wrong (hyper most, whose outputs are also handed
the gradients of other weights). Reductions and shapes are right. A right cause says that
ranks past the first read their slice of the generated flat weight at the wrong offset
(from the chunk's start). The fix: skip begin - first * CHUNK values."""
