"""A GRU on three tensor-parallel ranks, its seven hidden units in parts of 3, 2 and 2: each rank computes the gates of its own units from the whole state, that is gathered over the ranks after every step.
Embedding and head are on all ranks. Two micro-batches (3 and 2 rows); the divisor is the number of words.

The bug: the two biases of the candidate are put together outside the reset gate, tanh(W x + b_i + b_h + r * U h), as can be done for the other gates; right is tanh(W x + b_i + r * (U h + b_h)). After the
two kinds of GRU (ONNX's linear_before_reset, Keras' reset_after) and reports on hand-written GRU cells that do not agree with torch.nn.GRU.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
WORDS, WIDTH, UNITS, LENGTH, ROWS = 11, 5, 7, 4, 5
EDGES = [0, 3, 5, 7]
PARTS = [(0, 3), (3, 5)]


class ToAllRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class GatherUnits(torch.autograd.Function):
    """The whole state is used alike on all ranks: each keeps its own units' gradient."""

    @staticmethod
    def forward(ctx, h, held, group):
        ctx.held = held
        whole = h.new_zeros(h.shape[0], UNITS)
        whole[:, held] = h
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, grad):
        return grad[:, ctx.held], None, None


def candidate_inside(x, h, reset, bias_x, bias_h):
    return torch.tanh(x + bias_x + reset * (h + bias_h))


def candidate_outside(x, h, reset, bias_x, bias_h):
    return torch.tanh(x + reset * h + (bias_x + bias_h))


class Cell(nn.Module):
    """Gates: reset, update, candidate (the first dimension)."""

    def __init__(self):
        super().__init__()
        self.weight_x = nn.Parameter(torch.randn(3, UNITS, WIDTH) * 0.5)
        self.weight_h = nn.Parameter(torch.randn(3, UNITS, UNITS) * 0.5)
        self.bias_x = nn.Parameter(torch.randn(3, UNITS) * 0.5)
        self.bias_h = nn.Parameter(torch.randn(3, UNITS) * 0.5)
        self.candidate, self.held, self.group = candidate_inside, slice(0, UNITS), None

    def cut(self, held, group):
        self.held, self.group = held, group
        for name in ("weight_x", "weight_h", "bias_x", "bias_h"):
            setattr(self, name, nn.Parameter(getattr(self, name).detach()[:, held].clone()))

    def forward(self, x, state):
        old = state[:, self.held]
        if self.group is not None:
            whole = ToAllRanks.apply(state, self.group)
            x, old = ToAllRanks.apply(x, self.group), whole[:, self.held]
            state = whole
        from_x = torch.einsum("rw,guw->gru", x, self.weight_x)
        from_h = torch.einsum("rk,guk->gru", state, self.weight_h)
        bias = self.bias_x + self.bias_h
        reset = torch.sigmoid(from_x[0] + from_h[0] + bias[0])
        update = torch.sigmoid(from_x[1] + from_h[1] + bias[1])
        new = self.candidate(from_x[2], from_h[2], reset, self.bias_x[2], self.bias_h[2])
        own = (1 - update) * new + update * old
        return own if self.group is None else GatherUnits.apply(own, self.held, self.group)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.cell = Cell()
        self.head = nn.Linear(UNITS, WORDS)

    def forward(self, rows):
        x = self.words(rows["ids"])
        state, scores = x.new_zeros(len(x), UNITS), []
        for t in range(LENGTH):
            state = self.cell(x[:, t], state)
            scores.append(self.head(state))
        scores = torch.stack(scores, 1).flatten(0, 1)
        return F.cross_entropy(scores, rows["labels"].flatten(), reduction="sum")


class Clean:
    candidate = staticmethod(candidate_inside)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows):
        return model(rows), rows["labels"].numel()

    def distribute(self, model, ctx):
        model.cell.cut(slice(EDGES[ctx.rank], EDGES[ctx.rank + 1]), ctx.group("tp"))
        model.cell.candidate = self.candidate
        return model

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        for low, high in PARTS:
            loss = model({k: v[low:high] for k, v in batch.items()})
            (loss / batch["labels"].numel()).backward()


class Buggy(Clean):
    candidate = staticmethod(candidate_outside)


EXPECT = dict(
    right=[
        r"cell|candidate|bias_h|reset|tanh|own\b|new\b",
        r"forward|bias|reset|argument|input|differ|output|result|value",
    ],
    place=[r"cell|candidate|bias|tanh"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"mean of (the )?means|wrong divisor|own count|counted on (every|all|each) ranks?",
        r"only (on )?rank [0-2]\b|backward formula|GatherUnits.{0,20}backward",
        r"embedding .{0,20}is wrong|head('s)? .{0,15}(forward|weight) is wrong",
    ],
)
WHY = (
    "On all ranks, units, steps and micro-batches the candidate is tanh(W x + r * U h + b_i + b_h); right is tanh(W x + b_i + r * (U h + b_h)): bias_h[2] is not multiplied by the reset gate. Already the "
    "first step (state 0) is wrong, for r is not 1. Reset and update gates of the first step are right (their biases may be put together), embedding, cuts, gathering, copies, head, divisor 20 are right. "
    "The first wrong value is the cell's candidate at the first step, all gradients are wrong on all ranks. Fix: r * (U h + b_h)."
)
