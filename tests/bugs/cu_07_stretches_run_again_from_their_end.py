"""A gated recurrent cell by hand for sensor signals of ten instants, data parallel over three
ranks (3, 2 and 2 of 7 rows). To save memory the rank first runs through the stretches of time (4,
4, 2) without a graph, keeps the state at the cuts, and then, last stretch first, runs each again
with a graph and hands the state's gradient on to the stretch before.

Bug: the state is noted after a stretch and not before it, so every stretch is run again from the
state at its own end. After hand-written checkpointing over time with an off-by-one in the list.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, TIMES, STRETCH, INPUTS, STATE = 7, 10, 4, 3, 5


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(INPUTS + STATE, STATE)
        self.enter = nn.Linear(INPUTS, STATE)
        self.turn = nn.Linear(STATE, STATE, bias=False)
        self.start = nn.Parameter(torch.randn(STATE))
        self.read = nn.Linear(STATE, 1)

    def first(self, x):
        return self.start.expand(x.shape[0], -1)

    def run(self, x, state):
        read = []
        for now in x.unbind(1):
            gate = torch.sigmoid(self.gate(torch.cat([now, state], 1)))
            fresh = torch.tanh(self.enter(now) + self.turn(gate * state))
            state = gate * state + (1 - gate) * fresh
            read.append(self.read(state))
        return torch.cat(read, 1), state

    def forward(self, x):
        return self.run(x, self.first(x))[0]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 71)
        return Cell()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 710)
        return {
            "x": torch.randn(ROWS, TIMES, INPUTS, generator=g),
            "y": torch.randn(ROWS, TIMES, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["x"]) - rows["y"]).square().sum(), rows["y"].numel()

    def states(self, model, stretches):
        state, kept = model.first(stretches[0]), []
        for x in stretches:
            kept.append(state)
            _, state = model.run(x, state)
        return kept

    def walk_back(self, model, rows):
        stretches = rows["x"].split(STRETCH, dim=1)
        wanted = rows["y"].split(STRETCH, dim=1)
        with torch.no_grad():
            kept = self.states(model, stretches)
        later = torch.zeros_like(kept[0])
        for x, y, state in zip(stretches[::-1], wanted[::-1], kept[::-1], strict=True):
            begin = state.detach().requires_grad_()
            read, end = model.run(x, begin)
            loss = (read - y).square().sum() / (ROWS * TIMES)
            torch.autograd.backward([loss, end], [None, later])
            later = begin.grad
        model.first(rows["x"]).backward(later)

    def step(self, model, batch, ctx):
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in own.split(2):
            self.walk_back(model, {k: v[part] for k, v in batch.items()})
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def states(self, model, stretches):
        state, kept = model.first(stretches[0]), []
        for x in stretches:
            _, state = model.run(x, state)
            kept.append(state)
        return kept


EXPECT = dict(
    right=[
        r"state|kept|hidden|carry|h0|begin|initial",
        r"\bend\b|\bafter\b|off.by.one|\bnext\b|\blater?\b|too far|shift|not the (start|begin)|"
        r"(other|wrong|different).{0,30}states?\b|states?\b.{0,60}(differ|other|wrong|instead)",
        r"stretch|segment|chunk|window|recomput|re.?run|run again|checkpoint|states|time",
    ],
    place=[r"\bstates\b", r"kept\.append", r"\bkept\b", r"walk_back", r"state\.detach|\bbegin\b"],
    wrong=[
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"(detach|truncat)\w*.{0,40}(cuts|stops|lost|no gradient)",
        r"(gate|turn|fresh).{0,40}(derivative|formula) .{0,20}wrong",
        r"(divisor|denominator|normali[sz]).{0,40}(wrong|local|own)",
        r"(micro.?batch|rank).{0,30}mean of means",
    ],
)
WHY = """kept[i] must be the state at the beginning of stretch i. Buggy.states appends after running
the stretch, so kept[i] is the state at its end: all three stretches are run again from the state
one stretch too late (the first never starts from model.start). Reads, losses and gradients of
every parameter are wrong; the handing on of `later` and the reduction are right.
Fix: append the state before model.run."""
