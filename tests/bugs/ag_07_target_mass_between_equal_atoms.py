"""Distributional Q-learning (C51) under DDP on three ranks with accumulation: a small network gives a distribution over nine atoms (-2 .. 2) per action; the target is the distribution of the next state (from the target network, given
in the batch) moved by reward and discount, clamped and projected on the atoms; cross entropy; divisor: number of transitions.

The bug: the projection gives the mass at b to the atoms l = floor(b) and u = ceil(b) with the shares u - b and b - l. If b is a whole number (terminal transitions whose reward is an atom, or values clamped at the ends) l = u = b,
both shares are zero and the mass disappears. After floringogianu/categorical-dqn issue 1 and PR 2 (disappearing probability mass), Kchu/DeepRL_PyTorch issue 2.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
STATE, ACTIONS, ATOMS, LOWEST, HIGHEST, DISCOUNT = 5, 3, 9, -2.0, 2.0, 0.9
REWARD = [0.13, 1.0, -0.07, 0.04, -0.5, -0.16, 0.3, 0.13, -0.07, 1.5, 0.04, 0.73, -0.16]
DONE = [0, 1, 0, 0, 1, 0, 1, 0, 0, 1, 0, 0, 0]
PARTS = [[(0, 2), (2, 4), (4, 5)], [(5, 7), (7, 9)], [(9, 10), (10, 13)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(STATE, 10), nn.Tanh(), nn.Linear(10, 8), nn.Tanh())
        self.value = nn.Linear(8, ATOMS)
        self.advantage = nn.Linear(8, ACTIONS * ATOMS)

    def forward(self, state):
        hidden = self.body(state)
        advantage = self.advantage(hidden).unflatten(1, (ACTIONS, ATOMS))
        return self.value(hidden)[:, None] + advantage - advantage.mean(1, keepdim=True)


def projected(rows, keep_whole):
    atoms = torch.linspace(LOWEST, HIGHEST, ATOMS, dtype=torch.float64)
    width = (HIGHEST - LOWEST) / (ATOMS - 1)
    reward = rows["reward"].double().mul(100).round().div(100)
    moved = reward[:, None] + DISCOUNT * (1 - rows["done"][:, None]) * atoms
    b = (moved.clamp(LOWEST, HIGHEST) - LOWEST) / width
    lower, upper = b.floor().long(), b.ceil().long()
    share = upper - b
    if keep_whole:
        share = share + (lower == upper)
    mass = rows["next"].double()
    target = torch.zeros_like(mass).scatter_add(1, lower, mass * share)
    return target.scatter_add(1, upper, mass * (b - lower))


def q_loss(model, rows, keep_whole):
    logits = model(rows["state"])
    chosen = logits[torch.arange(len(logits)), rows["action"]]
    return -(projected(rows, keep_whole).to(logits.dtype) * F.log_softmax(chosen, 1)).sum()


class Clean:
    keep_whole = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(REWARD)
        return {
            "state": torch.randn(rows, STATE, generator=g),
            "action": torch.randint(ACTIONS, (rows,), generator=g),
            "reward": torch.tensor(REWARD),
            "done": torch.tensor(DONE),
            "next": torch.randn(rows, ATOMS, generator=g).softmax(1),
        }

    def loss_sum(self, model, rows):
        return q_loss(model, rows, True), len(rows["action"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (q_loss(model, rows, self.keep_whole) * ctx.world_size / len(REWARD)).backward()


class Buggy(Clean):
    keep_whole = False


EXPECT = dict(
    right=[
        r"(?i)rows? |rows?\b|transition|loss|target|coefficient",
        r"(?i)missing|lost|absent|zero|\b0\b|no (part|gradient|contribution)|not (counted|in)|dropped|left out|never|weight|target|disappear",
        r"(?i)\b(1|4|9|11)\b|loss|target|terminal",
    ],
    place=[r"(?i)rows? |loss|target|\b(1|4|9)\b"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|wrong (for|in) all rows",
        r"(?i)(forward|output) of (body|value|advantage|the model) (is|goes) wrong|goes wrong in the (forward|backward) of",
        r"(?i)all gradients .{0,15}scaled|same factor",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)row 6\b.{0,20}(lost|missing|wrong)|action.{0,15}wrong",
    ],
)
WHY = (
    "Rows 1, 4 (rank 0; micro-batches 0 and 2) and 9 (rank 2, micro-batch 0) are terminal with rewards 1, -0.5 and 1.5, which are atoms: the whole target mass disappears, their target is zero and they give no gradient (coefficient "
    "0 instead of 1/13). Row 11 (rank 2, micro-batch 1; reward 0.73, not terminal) loses the mass of its two highest atoms, which are clamped to 2: its target sums to less than 1. All other rows are right, also the terminal row 6 "
    "(reward 0.3 lies between atoms); rank 1 has no wrong row. The model's forward is right; the loss (its target) is wrong, and all parameters' gradients with it, equally on all ranks after the average. Divisor 13, no_sync, "
    "reduction are right. Fix: give the mass to the one atom where lower == upper."
)
