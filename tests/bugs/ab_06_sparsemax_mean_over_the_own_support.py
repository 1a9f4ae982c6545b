"""A recommender with a learned memory (user features make a query, two hops of attention over 17 memory slots with sparsemax in place of softmax, regression of two ratings), data parallel 2 x slot parallel 3: keys and values are cut by slots,
6, 6 and 5 on the three ranks. The threshold of sparsemax comes from the gathered scores; sparsemax over the shards is an own autograd.Function. Uneven rows.

The bug: the backward of sparsemax takes the mean of the incoming gradients over the support, the slots with a weight above zero. It is taken over the support in the own shard. Sum and count must both be those of all shards. In the forward the
gather of the scores was not to be forgotten (the weights would not add up to one); here all shapes agree without any exchange. After implementations of vocabulary parallel entmax.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "mp": 3}}}}
ROWS, FEATURES, WIDTH, SLOTS, HOPS = 11, 6, 8, 17, 2


def threshold(scores):
    """The tau of sparsemax, for the scores of all slots."""
    ordered = scores.sort(-1, descending=True).values
    rank = torch.arange(1, scores.shape[-1] + 1, dtype=scores.dtype)
    total = ordered.cumsum(-1) - 1
    size = (rank * ordered > total).sum(-1, keepdim=True)
    return total.gather(-1, size - 1) / size


class Sparsemax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, span, group, everywhere):
        whole = scores
        if group is not None:
            whole = scores.new_zeros(scores.shape[0], SLOTS)
            whole[:, span] = scores
            dist.all_reduce(whole, group=group)
        weights = (scores - threshold(whole)).clamp(min=0)
        ctx.save_for_backward(weights)
        ctx.group, ctx.everywhere = group, everywhere
        return weights

    @staticmethod
    def backward(ctx, g):
        support = ctx.saved_tensors[0] > 0
        g = g * support
        both = torch.stack([g.sum(-1), support.sum(-1).to(g.dtype)])
        if ctx.group is not None and ctx.everywhere:
            dist.all_reduce(both, group=ctx.group)
        mean = both[0] / both[1].clamp(min=1)
        return (g - mean[:, None]) * support, None, None, None


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class Hop(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.query = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.keys = nn.Parameter(torch.randn(SLOTS, WIDTH))
        self.values = nn.Parameter(torch.randn(SLOTS, WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.span, self.group, self.everywhere = slice(0, SLOTS), None, True

    def forward(self, x):
        q = self.query(self.norm(x))
        if self.group is not None:
            q = Copy.apply(q, self.group)
        scores = q @ self.keys.t() * 0.4
        weights = Sparsemax.apply(scores, self.span, self.group, self.everywhere)
        read = weights @ self.values
        if self.group is not None:
            read = Sum.apply(read, self.group)
        return x + torch.tanh(self.out(read))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.hops = nn.ModuleList(Hop() for _ in range(HOPS))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = torch.tanh(self.enter(x))
        for hop in self.hops:
            x = hop(x)
        return self.head(x)


class Clean:
    everywhere = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "user": 1.5 * torch.randn(ROWS, FEATURES, generator=g),
            "rating": torch.randn(ROWS, 2, generator=g),
        }

    def loss_sum(self, model, rows):
        return ((model(rows["user"]) - rows["rating"]) ** 2).sum(), len(rows["user"])

    def distribute(self, model, ctx):
        own = torch.arange(SLOTS).tensor_split(ctx.axes["mp"])[ctx.coords["mp"]]
        span = slice(int(own[0]), int(own[-1]) + 1)
        for hop in model.hops:
            hop.keys = nn.Parameter(hop.keys.detach()[span].clone())
            hop.values = nn.Parameter(hop.values.detach()[span].clone())
            hop.span, hop.group, hop.everywhere = span, ctx.group("mp"), self.everywhere
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        (self.loss_sum(model, mine)[0] / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    everywhere = False


EXPECT = dict(
    right=[
        r"(?i)backward|adjoint|transpos|gradient of|vjp",
        r"(?i)sparsemax|support|scores|slots?|shard|local|own part|keys|\bmp\b|attention|weights of|all.?reduc|exchange|across",
    ],
    place=[r"(?i)sparsemax|hops?\.[01]|keys|quer(y|ies)|scores|support"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor of the loss|factor of (1/)?[236]\b",
        r"(?i)(head|hops\.1\.(values|out))(\.(weight|bias))? (is|are) wrong",
        r"(?i)keys .{0,40}(never|not) (been )?(all.?)?reduced",
        r"(?i)rows? .{0,20}(never read|read twice|dropped)",
    ],
)
WHY = (
    "The backward of Sparsemax subtracts from the incoming gradients of the support their mean over the support; sum and count of it are taken in the own shard of the slots and not over the mp group. Forward and loss are right. The "
    "gradients of the scores are wrong on every rank for rows whose support lies in several shards (for a row whose support has one slot in a shard, that shard's gradient is zero); right where the support lies in one shard. Wrong, in "
    "direction: keys of both hops, on all mp ranks; query and norm of both hops, values and out of hops.0, and enter. Right: head, and of hops.1 values and out, which lie behind the last sparsemax. What is replicated is the same on all "
    "ranks, since Copy sums it over mp. The sums over dp and mp, the threshold, the count and the rows are right. Fix: all-reduce the sum and the count over mp before the mean."
)
