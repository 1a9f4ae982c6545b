"""A denoiser with a control branch, on two pools of unlike size: the branch (trainable) turns a condition into two residuals and sends them, packed in one tensor, to the pool of the denoiser, whose encoder
is frozen and whose decoder is trained; the residuals' gradient comes back. The first residual enters in the middle of the encoder, the second at the decoder. After reports on ControlNet-like branches
(`sd_locked`, `with torch.no_grad()` around the locked half).
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"control": {"axes": {"dp": 2}}, "denoiser": {"axes": {"dp": 3}}}}
ROWS, INPUTS, HINT, WIDTH = 11, 7, 5, 9


class Control(nn.Module):
    def __init__(self):
        super().__init__()
        self.hint, self.first, self.second = (
            nn.Linear(HINT, 12),
            nn.Linear(12, WIDTH),
            nn.Linear(12, WIDTH),
        )
        self.deep = nn.Linear(12, 12)

    def forward(self, condition):
        x = F.silu(self.hint(condition))
        return torch.stack([self.first(x), self.second(F.silu(self.deep(x)))], 1)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Linear(1, WIDTH)
        self.enter, self.middle = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.leave = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INPUTS)
        for part in (self.time, self.enter, self.middle):
            part.requires_grad_(False)

    def encode(self, noisy, t, residual):
        x = F.silu(self.enter(noisy) + self.time(t)) + residual
        return x + F.silu(self.middle(x))

    def decode(self, x, residual):
        return self.leave(self.norm(x + residual))


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.control, self.denoiser = Control(), Denoiser()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Both()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        t, x, noise = (torch.rand(ROWS, 1, generator=g), *torch.randn(2, ROWS, INPUTS, generator=g))
        return {
            "condition": torch.randn(ROWS, HINT, generator=g),
            "t": t,
            "noisy": (1 - t) * x + t * noise,
            "velocity": noise - x,
        }

    def locked(self):
        """Around the frozen half."""
        return contextlib.nullcontext()

    def error(self, denoiser, rows, residuals, around):
        with around:
            x = denoiser.encode(rows["noisy"], rows["t"], residuals[:, 0])
        return (denoiser.decode(x, residuals[:, 1]) - rows["velocity"]).square().sum()

    def loss_sum(self, model, rows):
        residuals = model.control(rows["condition"])
        return self.error(model.denoiser, rows, residuals, contextlib.nullcontext()), len(residuals)

    def distribute(self, model, ctx):
        return nn.ModuleDict({ctx.pool: getattr(model, ctx.pool)})

    def step(self, model, batch, ctx):
        first, end = self.span(ctx, ctx.rank)
        mine = {k: v[first:end] for k, v in batch.items()}
        if ctx.pool == "control":
            residuals = model["control"](mine["condition"])
            self.send(residuals.detach(), ctx)
            residuals.backward(self.receive(torch.zeros_like(residuals), ctx))
        else:
            residuals = self.receive(torch.zeros(end - first, 2, WIDTH, dtype=ctx.dtype), ctx)
            residuals.requires_grad_()
            (self.error(model["denoiser"], mine, residuals, self.locked()) / ROWS).backward()
            self.send(residuals.grad, ctx)
        for param in model.parameters():
            if param.requires_grad:
                dist.all_reduce(param.grad, group=ctx.group("dp"))

    @staticmethod
    def span(ctx, rank):
        ranks = next(r for r in ctx.pools.values() if rank in r)
        i, n = ranks.index(rank), len(ranks)
        return ROWS * i // n, ROWS * (i + 1) // n

    def shared(self, ctx):
        """Of each rank of the other pool: the rows of this rank that it has, too."""
        first, end = self.span(ctx, ctx.rank)
        for pool, ranks in ctx.pools.items():
            for other in ranks if pool != ctx.pool else []:
                a, b = self.span(ctx, other)
                if max(a, first) < min(b, end):
                    yield other, slice(max(a, first) - first, min(b, end) - first)

    def send(self, rows, ctx):
        for work in [
            dist.isend(rows[part].contiguous(), other) for other, part in self.shared(ctx)
        ]:
            work.wait()

    def receive(self, into, ctx):
        parts = [(part, torch.empty_like(into[part]), other) for other, part in self.shared(ctx)]
        for work in [dist.irecv(rows, other) for _, rows, other in parts]:
            work.wait()
        for part, rows, _ in parts:
            into[part] = rows
        return into


class Buggy(Clean):
    def locked(self):
        return torch.no_grad()


EXPECT = dict(
    right=[
        r"first|residual|control|middle|encode",
        r"never comes?|missing|lost|zero|no gradient|without (a )?(gradient|graph)|no_grad|detach|not reach|does not (come|get|pass)|cut|stops?|lacks?|only part|no path|none",
    ],
    place=[r"control|first|middle|encode|residual"],
    wrong=[
        r"forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(is|are|was|were) (never|not) (been )?(all.?)?reduced|missing all.?reduc|reduced (twice|again)",
        r"(own|local) (count|denominator|divisor)",
        r"(leave|norm|second|deep)\S* (is|are|has|have|was|were) (a )?(wrong|missing|partial|zero)",
        r"rows? .{0,20}(never read|read twice)|gradient of other targets",
        r"group of another pool|scaled by|averaged",
    ],
)
WHY = (
    "The denoiser's pool runs its frozen encoder under no_grad. Nothing of it is trained, but the first residual of the control branch enters inside of it: its gradient has to go back through `middle`, and is lost. On the denoiser's ranks "
    "the received residuals get a gradient only in the second half of the packed tensor; the first is zero. So on both control ranks control.first has zero gradient, control.hint lacks the part that comes through it; "
    "control.second, control.deep and the decoder (norm, leave) are right. Forward, loss, divisor, exchange and reductions are right."
)
