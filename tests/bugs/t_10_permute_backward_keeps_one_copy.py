"""Experts in parallel (ep 2) with two data replicas: top-2 routing, a permute with a backward of its own, functional all-to-alls; unlike rows.
After the reports on fused MoE permute kernels whose backward has to accumulate the top-k copies of a token.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "ep": 2}}}}
ROWS, LENGTH, INPUTS, WIDTH, EXPERTS, TOP = 9, 5, 7, 8, 4, 2


class Permute(torch.autograd.Function):
    """Row i of the result is token order[i] // TOP: TOP copies of every token, sorted by expert."""

    @staticmethod
    def forward(ctx, x, order):
        ctx.save_for_backward(order // TOP)
        ctx.tokens = len(x)
        return x[order // TOP]

    @staticmethod
    def backward(ctx, grad):
        (token,) = ctx.saved_tensors
        return grad.new_zeros(ctx.tokens, grad.shape[1]).index_add_(0, token, grad), None


class CopyingPermute(Permute):
    @staticmethod
    def backward(ctx, grad):
        (token,) = ctx.saved_tensors
        return grad.new_zeros(ctx.tokens, grad.shape[1]).index_copy_(0, token, grad), None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(WIDTH, 11),
            nn.Linear(WIDTH, 11),
            nn.Linear(11, WIDTH),
        )

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.mixer = nn.Linear(INPUTS, WIDTH), nn.Linear(LENGTH, LENGTH)
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x, run_experts):
        h = self.inside(x)
        h = (h + torch.tanh(self.mixer(h.transpose(1, 2)).transpose(1, 2))).flatten(0, 1)
        z = self.norm(h)
        gates, chosen = (1.5 * self.router(z)).softmax(-1).topk(TOP)
        y = run_experts(self.experts, z, chosen)
        return self.head(self.last(h + (gates[..., None] * y).sum(1))).unflatten(0, x.shape[:2])


def dense_experts(experts, z, chosen):
    every = torch.stack([e(z) for e in experts], 1)
    return every.gather(1, chosen[..., None].expand(-1, -1, WIDTH))


class Clean:
    permute = Permute

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": 1.5 * torch.randn(ROWS, LENGTH, INPUTS, generator=g),
            "y": torch.randn(ROWS, LENGTH, 2, generator=g),
        }

    def loss_sum(self, model, rows):
        y = rows["y"]
        return (model(rows["x"], dense_experts) - y).square().sum(), y.shape[0] * y.shape[1]

    def distribute(self, model, ctx):
        for i in range(EXPERTS):
            if i // (EXPERTS // ctx.axes["ep"]) != ctx.coords["ep"]:
                model.experts[i] = nn.Identity()
        return model

    def step(self, model, batch, ctx):
        n, me, group = ctx.axes["ep"], ctx.coords["ep"], ctx.group("ep")
        here = EXPERTS // n

        def run_experts(experts, z, chosen):
            order = chosen.flatten().argsort(stable=True)
            counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts, group=group)
            theirs = theirs.view(n, here)
            sent, got = counts.view(n, here).sum(1).tolist(), theirs.sum(1).tolist()
            came = all_to_all_single_autograd(self.permute.apply(z, order), got, sent, group)
            which = (
                torch.arange(here, device=z.device).repeat(n).repeat_interleave(theirs.flatten())
            )
            local = which.argsort(stable=True)
            parts = came[local].split(theirs.sum(0).tolist())
            mine = experts[me * here : (me + 1) * here]
            out = torch.cat([e(p) for e, p in zip(mine, parts, strict=True)])
            back = all_to_all_single_autograd(out[local.argsort()], sent, got, group)
            return back[order.argsort()].unflatten(0, (-1, TOP))

        rank = ctx.coords["dp"] * n + me
        x, y = (batch[k].tensor_split(n * ctx.axes["dp"])[rank] for k in ("x", "y"))
        loss = (model(x, run_experts) - y).square().sum()
        (loss / (ROWS * LENGTH)).backward()
        for name, p in model.named_parameters():
            axes = ("dp",) if name.startswith("experts.") else ("dp", "ep")
            dist.all_reduce(p.grad, group=ctx.group(*axes))


class Buggy(Clean):
    permute = CopyingPermute


EXPECT = dict(
    right=[r"backward|gradient", r"norm|between|permute|experts?|copies|copy|dispatch|index"],
    place=[r"\bnorm\b|permute|dispatch|between|experts?"],
    wrong=[
        r"forward (is|goes|was) wrong|goes wrong in the forward|forward .{0,40}goes wrong",
        r"(is|are|was|were) (never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"(counted|reduced|summed) (twice|again)",
        r"do(es)? not read every row once|rows? .{0,20}(never|twice) read",
        r"experts\.\d\S* (is|are) wrong|(last|head|router)\S* (is|are) wrong",
        r"backward of \S*(experts?|router|last|head|gate|up|down|inside|mixer)\b\S* is wrong",
    ],
)
WHY = (
    "The forward is right, so are the gradients of head, last, router and all experts. The backward of the permute writes the gradients of the two copies of a token with index_copy_ where it must add them "
    "(index_add_), so only one copy, that of the expert with the higher number, comes through. First wrong is the gradient that reaches norm's output, for every token on all four ranks; norm, mixer and inside "
    "have wrong gradients. Reductions and all-to-alls are right."
)
