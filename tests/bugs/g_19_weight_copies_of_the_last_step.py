"""A multilayer perceptron under DDP whose linear layers keep a transposed copy of their weight for the micro-batches of a step. After
Transformer Engine's weight caching (is_first_microbatch) and the reports on weights cached for FP8 that go stale (FAULTS class C13/C15,
state that outlives its step): the copy is made when there is none and is not thrown away at the end of the step.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, INPUTS, WIDTH, TARGETS, MICRO_BATCHES = 15, 6, 9, 3, 3


class WithCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, copy):
        ctx.save_for_backward(x, copy)
        return x @ copy

    @staticmethod
    def backward(ctx, grad):
        x, copy = ctx.saved_tensors
        return grad @ copy.T, grad.T @ x, None


class CachedLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = nn.Parameter(0.1 * torch.randn(outputs))
        self.copy = None

    def forward(self, x):
        if self.copy is None:
            self.copy = self.weight.detach().T.contiguous()
        return WithCopy.apply(x, self.weight, self.copy) + self.bias


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(INPUTS, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = CachedLinear(WIDTH, 11), CachedLinear(11, WIDTH)
        self.last = nn.Linear(WIDTH, TARGETS)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.down(F.gelu(self.up(self.norm(x)))))


def forget_copies(model):
    for module in model.modules():
        if isinstance(module, CachedLinear):
            module.copy = None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Network()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        x = torch.randn(ROWS, INPUTS, generator=g)
        return {"x": x, "y": x[:, :TARGETS].sin() + 0.2 * torch.randn(ROWS, TARGETS, generator=g)}

    def loss_sum(self, model, rows):
        forget_copies(model)
        return F.mse_loss(model(rows["x"]), rows["y"], reduction="sum") / TARGETS, len(rows["x"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def end_of_step(self, model):
        forget_copies(model)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for i in range(MICRO_BATCHES):
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            with contextlib.nullcontext() if i == MICRO_BATCHES - 1 else model.no_sync():
                loss = F.mse_loss(model(micro["x"]), micro["y"], reduction="sum") / TARGETS
                (loss * ctx.world_size / ROWS).backward()
        self.end_of_step(model)


class Buggy(Clean):
    def end_of_step(self, model):
        pass


EXPECT = dict(
    right=[
        r"step \W?(1|2|two)\b|second step|later step|after the first|from step|step 0 .{0,30}(right|pass)|stale|old|previous|"
        r"earlier|last step|first step",
        r"forward|output|weight|\bup\b|copy|cache|stale|value",
    ],
    place=[r"\bup\b", r"step \W?1\b|second step", r"down", r"(all|every|each) ranks?"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced",
        r"(counted|reduced|summed) (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (right|exact|correct)$",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
        r"(output|forward) of (the )?(first|norm)\S* (is|was) wrong",
        r"(divided|normali[sz]ed) by (its|the|their) own",
    ],
)
WHY = (
    "up and down keep the transposed weights of the first step, so the first step is right and from the second on they compute with old "
    "weights: the forward is wrong from up on, on both ranks and in all micro-batches, and so are the gradients of all parameters."
)
