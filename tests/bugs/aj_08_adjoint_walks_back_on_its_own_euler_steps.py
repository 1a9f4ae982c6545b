"""Neural ODE classifier under DDP on three ranks, two micro-batches each (no_sync for the first): an encoder, four explicit Euler steps of a small vector field in an own autograd Function with the adjoint method, and a head. The
backward walks back over the steps and takes at each of them the vector-Jacobian product of one Euler step.

The bug: to save memory the Function keeps the final state only and gets the earlier ones by Euler steps backwards in time (z - h f(z)), as the continuous adjoint does. That is not the inverse of the explicit step, so the products are
taken at other states than those of the forward. As in rtqichen/torchdiffeq issue 88 (loss diverging with the adjoint and the Euler solver; without the adjoint it works).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
FEATURES, WIDTH, HIDDEN, CLASSES, STEPS, H = 4, 5, 7, 3, 4, 0.5
PARTS = [[(0, 2), (2, 5)], [(5, 6), (6, 8)], [(8, 10), (10, 11)]]


def euler_step(z, w1, b1, w2, b2):
    return z + H * F.linear(torch.tanh(F.linear(z, w1, b1)), w2, b2)


class Flow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, keep_all, *weights):
        states = [z]
        for _ in range(STEPS):
            states.append(euler_step(states[-1], *weights))
        ctx.keep_all, ctx.count = keep_all, len(weights)
        ctx.save_for_backward(*weights, *(states if keep_all else states[-1:]))
        return states[-1]

    @staticmethod
    def backward(ctx, adjoint):
        weights = [w.detach().requires_grad_() for w in ctx.saved_tensors[: ctx.count]]
        states = ctx.saved_tensors[ctx.count :]
        sums, state = [torch.zeros_like(w) for w in weights], states[-1]
        for turn in reversed(range(STEPS)):
            if ctx.keep_all:
                state = states[turn]
            else:
                with torch.no_grad():
                    state = 2 * state - euler_step(state, *weights)
            with torch.enable_grad():
                z = state.detach().requires_grad_()
                after = euler_step(z, *weights)
            adjoint, *grads = torch.autograd.grad(after, [z, *weights], adjoint)
            for total, grad in zip(sums, grads):
                total.add_(grad)
        return adjoint, None, *sums


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.adjoint, self.keep_all = False, True

    def forward(self, z):
        weights = (self.one.weight, self.one.bias, self.two.weight, self.two.bias)
        if self.adjoint:
            return Flow.apply(z, self.keep_all, *weights)
        for _ in range(STEPS):
            z = euler_step(z, *weights)
        return z


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.field = nn.Linear(FEATURES, WIDTH), Field()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.field(self.encoder(x)))


class Clean:
    keep_all = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        return {
            "x": torch.randn(rows, FEATURES, generator=g),
            "label": torch.randint(CLASSES, (rows,), generator=g),
        }

    def loss_sum(self, model, rows):
        loss = F.cross_entropy(model(rows["x"]), rows["label"], reduction="sum")
        return loss, len(rows["label"])

    def distribute(self, model, ctx):
        model.field.adjoint, model.field.keep_all = True, self.keep_all
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts, total = PARTS[ctx.rank], len(batch["label"])
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (self.loss_sum(model, rows)[0] * ctx.world_size / total).backward()


class Buggy(Clean):
    keep_all = False


EXPECT = dict(
    right=[
        r"(?i)field|flow|ode|euler",
        r"(?i)backward|adjoint|gradient (of|that)|hands? (back|on)|jacobian|reconstruct|recomput",
    ],
    place=[r"(?i)field|flow"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong|differs)|goes wrong in the forward",
        r"(?i)head\.(weight|bias) (is|are) wrong",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
    ],
)
WHY = (
    "The forward is right everywhere. The backward of Flow (module `field`) is wrong on all ranks, rows and micro-batches: it reconstructs the states by z(k) = z(k+1) - h f(z(k+1)), whereas the forward has z(k+1) = z(k) + h f(z(k)); "
    "the error is of order h^2 per step and grows from the last step to the first. The Jacobians are taken at these states, so the gradients of field.one and field.two and the adjoint handed back to the encoder (encoder.weight, "
    "encoder.bias) are wrong in direction. Already the last step's state is wrong. Only head.weight and head.bias (and the gradient that enters field) are right. The same on all ranks after DDP's average; divisor 11, no_sync, "
    "reduction are right. Fix: keep the states of the forward (or checkpoints of them) and take the products there."
)
