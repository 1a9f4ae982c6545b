"""A survival model on tabular data (Cox partial likelihood over all 11 patients, Breslow's way with
tied times): an MLP gives each patient a risk; rows over dp (3): 4, 4 and 3, times in whole months.

The likelihood needs all risks at once, so the step goes in two passes: risks of the own rows
without graph, gathered from all ranks; loss and its gradient by the risks, the same on every rank;
then the own rows again in micro-batches of two with their part of this gradient.

Bug: the risk set of a patient is made by a running logsumexp along the patients in descending order
of time. Patients with the same time lie one behind the other, and the earlier ones of them miss the
later ones in their risk set. After pycox-like sorted losses used with discrete times.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
PATIENTS, FEATURES, HIDDEN = 11, 7, 9


def partial_likelihood(risk, time, event):
    at_risk = time[None, :] >= time[:, None]
    total = risk[None, :].masked_fill(~at_risk, float("-inf")).logsumexp(-1)
    return (total - risk)[event].sum()


def partial_likelihood_sorted(risk, time, event):
    order = time.argsort(descending=True, stable=True)
    risk, event = risk[order], event[order]
    return (risk.logcumsumexp(0) - risk)[event].sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 3)
        return nn.Sequential(
            nn.Linear(FEATURES, HIDDEN),
            nn.Tanh(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.SiLU(),
            nn.Linear(HIDDEN, 1, bias=False),
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 30)
        time = torch.randint(1, 6, (PATIENTS,), generator=g)
        event = torch.rand(PATIENTS, generator=g) < 0.7
        event[:3] = torch.tensor([True, True, False])
        return {
            "x": 1.5 * torch.randn(PATIENTS, FEATURES, generator=g),
            "time": time,
            "event": event,
        }

    def loss_sum(self, model, rows):
        risk = model(rows["x"])[:, 0]
        return partial_likelihood(risk, rows["time"], rows["event"]), rows["event"].sum()

    def likelihood(self, risk, time, event):
        return partial_likelihood(risk, time, event)

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        own = torch.arange(PATIENTS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        x = batch["x"]
        risk = x.new_zeros(PATIENTS)
        with torch.no_grad():
            for rows in own.split(2):
                risk[rows] = model(x[rows])[:, 0]
        dist.all_reduce(risk, group=group)
        risk.requires_grad_()
        loss = self.likelihood(risk, batch["time"], batch["event"]) / batch["event"].sum()
        (slope,) = torch.autograd.grad(loss, risk)
        for rows in own.split(2):
            model(x[rows])[:, 0].backward(slope[rows])
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def likelihood(self, risk, time, event):
        return partial_likelihood_sorted(risk, time, event)


EXPECT = dict(
    right=[
        r"\bties?\b|\btied\b|(same|equal|identical) (event |survival )?times?|risk.?sets?|at.?risk|"
        r"logcumsumexp|cumulative|sorted|partial_likelihood|likelihood",
        r"\bties?\b|\btied\b|(same|equal|identical) (event |survival )?times?|miss|left out|lack|"
        r"exclud|only (the )?(earlier|those before)|incomplete|logcumsumexp|"
        r"at.?risk|mask",
        r"loss|likelihood|risk|objective|slope",
    ],
    place=[r"partial_likelihood_sorted", r"\blikelihood\b", r"logcumsumexp", r"argsort"],
    wrong=[
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"ascending",
        r"(own|local) rows.{0,30}(risk|likelihood|negatives)",
        r"(rank|gather).{0,30}(order|reorder).{0,20}wrong",
        r"stale|detach\w*.{0,30}(wrong|missing)",
        r"(count|divisor).{0,30}event.{0,30}(own|local)",
    ],
)
WHY = """In Cox's partial likelihood the risk set of an event holds every patient whose time is not
smaller, also those with the same time. partial_likelihood_sorted takes logcumsumexp along the
descending order of times, so that of several patients with one time the first ones do not see the
others: their risk sets are too small, the loss is smaller and the slopes of all risks in ties are
wrong. Gathering, micro-batches and reduction are right. Fix: the comparison of times as a mask (or
take the value of the last of each tie)."""
