"""Discrete-time survival (patients in tabular rows, hazards of six intervals) under FSDP2 over
three ranks (4, 4 and 3 of 11 patients, in two micro-batches), trained by the Brier score with
inverse probability of censoring weights.

A patient with an event at T weighs 1 / G(T-), the chance to be uncensored just before T; one
still at risk at the horizon t weighs 1 / G(t). Times are whole months, so that censoring and
events fall on the same month.

Bug: the weight of the events is 1 / G(T): what is censored in the month of the event is counted
too. After IPCW scores that look up the censoring curve on the wrong side of its step.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
PATIENTS, FEATURES, H, INTERVALS, WIDTH = 11, 7, 9, 6, 4.0


class Hazards(nn.Module):
    def __init__(self, months, survival):
        super().__init__()
        self.enter = nn.Linear(FEATURES, H)
        self.mid = nn.Linear(H, H)
        self.leave = nn.Linear(H, INTERVALS)
        # the months in which some were censored and the curve after 0, 1, 2, ... of them
        self.register_buffer("months", months)
        self.register_buffer("curve", torch.cat([torch.ones(1), survival]))

    def forward(self, x):
        h = nn.functional.silu(self.enter(x))
        h = h + nn.functional.silu(self.mid(h))
        return nn.functional.logsigmoid(-self.leave(h)).cumsum(-1).exp()


def censored_before(months, time):
    """how many of the curve's steps lie before these times (a step at the time is not one)"""
    return (months[None] < time[:, None]).sum(-1)


def censored_until(months, time):
    return torch.bucketize(time, months, right=True)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 55)
        months = torch.tensor([2.0, 5.0, 8.0, 9.0, 14.0, 17.0, 21.0])
        survival = (1 - torch.tensor([0.12, 0.2, 0.1, 0.25, 0.15, 0.2, 0.3])).cumprod(0)
        return Hazards(months, survival)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 550)
        common = torch.tensor([5.0, 9.0, 14.0, 2.0, 17.0, 8.0, 23.0, 9.0, 12.0, 5.0, 21.0])
        return {
            "x": torch.randn(PATIENTS, FEATURES, generator=g),
            "time": common[torch.randperm(PATIENTS, generator=g)],
            "event": torch.rand(PATIENTS, generator=g) < 0.7,
        }

    def loss_sum(self, model, rows):
        scores = self.brier(model(rows["x"]), rows, model.months, model.curve, censored_before)
        return scores.sum(), rows["x"].shape[0] * INTERVALS

    def brier(self, alive, rows, months, curve, steps_of_the_events):
        time, event = rows["time"], rows["event"]
        horizons = (torch.arange(INTERVALS, device=time.device) + 1) * WIDTH
        weight_event = 1 / curve[steps_of_the_events(months, time)]
        weight_alive = 1 / curve[censored_until(months, horizons.to(months.dtype))]
        died = (time[:, None] <= horizons) & event[:, None]
        at_risk = time[:, None] > horizons
        score = died * alive.square() * weight_event[:, None]
        return score + at_risk * (1 - alive).square() * weight_alive

    def steps_of_the_events(self, months, time):
        return censored_before(months, time)

    def distribute(self, model, ctx):
        fully_shard(model.mid, mesh=ctx.mesh)
        return fully_shard(model, mesh=ctx.mesh)

    def step(self, model, batch, ctx):
        dp = ctx.axes["dp"]
        own = torch.arange(PATIENTS).tensor_split(dp)[ctx.coords["dp"]].tensor_split(2)
        for i, part in enumerate(own):
            model.set_requires_gradient_sync(i + 1 == len(own))
            rows = {k: v[part] for k, v in batch.items()}
            alive = model(rows["x"])
            scores = self.brier(alive, rows, model.months, model.curve, self.steps_of_the_events)
            (scores.sum() * dp / (PATIENTS * INTERVALS)).backward()


class Buggy(Clean):
    def steps_of_the_events(self, months, time):
        return torch.searchsorted(months, time, right=True)


EXPECT = dict(
    right=[
        r"weight|IPCW|censor|curve|\bG\b",
        r"event|died|death|steps_of_the_events",
        r"right\s*=\s*True|left|just before|before|T-|side|<=|one step|off.by.one|index|tie|"
        r"searchsorted|bucketize|same month",
    ],
    place=[r"steps_of_the_events", r"searchsorted", r"weight_event", r"\bbrier\b", r"curve\["],
    wrong=[
        r"(FSDP|fully_shard|dp).{0,50}(averag|divid|mean).{0,40}(wrong|twice|missing|instead)",
        r"(uneven|4, 4 and 3|fewer).{0,40}(rows|patients)",
        r"set_requires_gradient_sync",
        r"(weight_alive|at.risk).{0,30}(wrong|uses)",
        r"cumsum|hazard.{0,30}(wrong|sigmoid)",
    ],
)
WHY = """An event at T is weighted by 1 / G(T-), the censoring curve just before T, so only steps of
the curve strictly before T count. Buggy.steps_of_the_events uses searchsorted(right=True), which
counts a step in the month T itself: patients whose event falls on a month with censoring get the
weight 1 / G(T), too large by the step. All parameters' gradients are off through these rows' loss;
the model, FSDP and the divisor are right. Fix: right=False (left limit)."""
