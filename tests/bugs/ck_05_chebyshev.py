"""A Chebyshev graph network (ChebNet, four terms) on a fixed graph of eleven sensors, whose
nodes are cut over three ranks (4, 4, 3); each hop gathers all nodes. The stack T_k(L) x is a
Function that keeps nothing and goes back by Clenshaw's recurrence.

Bug: the backward recurrence runs with factor 2 down to k = 0, although T_1 = L x and not 2 L x.
After memory-saving ChebConv implementations, whose backward repeats the three-term recurrence.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"graph": 3}}}}
NODES, TERMS, FEATURES, WIDTH, ROWS = 11, 4, 3, 5, 5


def hop(x, lap, sizes, group):
    """The own rows of L x, from everyone's rows of x."""
    if group is None:
        return torch.einsum("nm,bmf->bnf", lap, x)
    padded = x.new_zeros(x.shape[0], max(sizes), x.shape[2])
    padded[:, : x.shape[1]] = x
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    every = torch.cat([p[:, :n] for p, n in zip(parts, sizes, strict=True)], 1)
    return torch.einsum("nm,bmf->bnf", lap, every)


def chebyshev(x, lap, sizes=None, group=None):
    terms = [x, hop(x, lap, sizes, group)]
    for _ in range(2, TERMS):
        terms.append(2 * hop(terms[-1], lap, sizes, group) - terms[-2])
    return torch.stack(terms)


class ShardedChebyshev(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lap, sizes, group):
        ctx.save_for_backward(lap)
        ctx.rest = sizes, group
        return chebyshev(x, lap, sizes, group)

    @staticmethod
    def backward(ctx, g):
        (lap,) = ctx.saved_tensors
        after = last = torch.zeros_like(g[0])
        for k in range(TERMS - 1, 0, -1):
            last, after = g[k] + 2 * hop(last, lap, *ctx.rest) - after, last
        return g[0] + hop(last, lap, *ctx.rest) - after, None, None, None


class LeanChebyshev(ShardedChebyshev):
    @staticmethod
    def backward(ctx, g):
        (lap,) = ctx.saved_tensors
        after = last = torch.zeros_like(g[0])
        for term in g.flip(0):
            last, after = term + 2 * hop(last, lap, *ctx.rest) - after, last
        return last, None, None, None


class ChebConv(nn.Module):
    shard = None

    def __init__(self, d_in, d_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(TERMS, d_in, d_out) / (TERMS * d_in) ** 0.5)
        self.bias = nn.Parameter(0.1 * torch.randn(d_out))

    def forward(self, x, lap):
        if self.shard is None:
            terms = chebyshev(x, lap)
        else:
            function, sizes, group = self.shard
            terms = function.apply(x, lap, sizes, group)
        return torch.einsum("kbnf,kfg->bng", terms, self.weight) + self.bias


class SensorNet(nn.Module):
    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(7)
        links = (torch.rand(NODES, NODES, generator=g) < 0.3).float().triu(1)
        links = links + links.T
        ring = torch.eye(NODES).roll(1, 0)
        links = (links + ring + ring.T).clamp(max=1)
        scale = links.sum(1).rsqrt()
        self.register_buffer("lap", -scale[:, None] * links * scale)
        self.first = ChebConv(FEATURES, WIDTH)
        self.second = ChebConv(WIDTH, WIDTH)
        self.third = ChebConv(WIDTH, 1)

    def forward(self, x, own=slice(None)):
        lap = self.lap[own]
        h = torch.tanh(self.first(x, lap))
        h = h + torch.tanh(self.second(h, lap))
        return self.third(h, lap).squeeze(-1)


class Clean:
    function = ShardedChebyshev

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 51)
        return SensorNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 510)
        return {
            "past": torch.randn(ROWS, NODES, FEATURES, generator=g),
            "next": torch.randn(ROWS, NODES, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["past"]) - rows["next"]).square().sum(), rows["next"].numel()

    def own(self, group):
        parts = torch.arange(NODES).tensor_split(dist.get_world_size(group))
        return parts[dist.get_rank(group)], [len(p) for p in parts]

    def distribute(self, model, ctx):
        group = ctx.group("graph")
        _, sizes = self.own(group)
        for conv in (model.first, model.second, model.third):
            conv.shard = self.function, sizes, group
        return model

    def step(self, model, batch, ctx):
        group = ctx.group("graph")
        own, _ = self.own(group)
        for lo in range(0, ROWS, 2):
            out = model(batch["past"][lo : lo + 2, own], own)
            loss = (out - batch["next"][lo : lo + 2, own]).square().sum()
            (loss / batch["next"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    function = LeanChebyshev


EXPECT = dict(
    right=[
        r"cheby|clenshaw|recurrence|recursion|three.?term|\bhop\b|lap\w*|T_?1",
        r"factor (of )?(2|two)|\b2 ?[*x]|twice|doubl|\b2 ?(hop|L)\b|two times|coefficient",
        (
            r"first|last|T_?1|k ?=+ ?(0|1)|final|lowest|order.?(1|one)|linear term|term (0|1"
            r"|zero|one)|every (term|step|k)|all terms|uniform|g\[0\]"
        ),
    ],
    place=[r"LeanChebyshev", r"Chebyshev", r"g\.flip", r"ChebConv", r"\blast\b"],
    wrong=[
        r"gather.{0,40}(backward|adjoint).{0,30}(missing|own slice)",
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"laplacian.{0,40}(transpos|asymmetric|not symmetric)",
        r"padd(ed|ing).{0,30}nodes",
        r"recurrence.{0,30}sign",
    ],
)
WHY = (
    "T_0 = x, T_1 = L x, T_k = 2 L T_(k-1) - T_(k-2): the factor 2 belongs to k >= 2 only. "
    "Clenshaw's backward therefore ends with g_0 + L b_1 - b_2, but LeanChebyshev.backward "
    "uses the same formula with 2 L in the last turn too, so the gradient of the input has L "
    "b_1 too much. Wrong are the gradients of the layers before a ChebConv: first and second "
    "(weight, bias); the third's are right, as weights' gradients come from the forward "
    "terms. A right cause says that the backward's last (k = 0) step doubles the Laplacian "
    "term. Fix: the last step without the factor 2."
)
