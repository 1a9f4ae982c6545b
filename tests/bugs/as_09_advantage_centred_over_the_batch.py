"""Dueling double DQN on three ranks under DDP, two micro-batches each of one to four transitions (no_sync for the first): Q = value + advantage - mean of the advantages over the actions. The online net chooses the next action, the frozen
target net values it, Huber loss of the chosen action's Q weighted by the importance weights of the prioritised replay, summed / 14 transitions.

The bug: the dueling head subtracts advantage.mean(), the mean over actions and all transitions of the micro-batch, instead of mean(1, keepdim=True). As in PacktPublishing/Deep-Reinforcement-Learning-Hands-On issues 6 and 52,
keras-rl/keras-rl issue 220 and PR 239, datawhalechina/easy-rl issue 95.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
STATE, ACTIONS, WIDTH, DISCOUNT = 4, 3, 8, 0.9
PARTS = [[(0, 2), (2, 5)], [(5, 9), (9, 10)], [(10, 11), (11, 14)]]
ROWS = 14


class Dueling(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(STATE, WIDTH), nn.Tanh())
        self.value, self.advantage = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, ACTIONS)
        self.over_all = False

    def forward(self, state):
        hidden = self.body(state)
        advantage = self.advantage(hidden)
        mean = advantage.mean() if self.over_all else advantage.mean(1, keepdim=True)
        return self.value(hidden) + advantage - mean


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.target = Dueling(), Dueling().requires_grad_(False)

    def forward(self, rows):
        q = self.online(rows["state"]).gather(1, rows["action"][:, None])[:, 0]
        with torch.no_grad():
            choice = self.online(rows["next"]).argmax(1, keepdim=True)
            ahead = self.target(rows["next"]).gather(1, choice)[:, 0]
        goal = rows["reward"] + DISCOUNT * rows["alive"] * ahead
        return (rows["weight"] * F.huber_loss(q, goal, reduction="none")).sum()


class Clean:
    over_all = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "state": torch.randn(ROWS, STATE, generator=g),
            "next": torch.randn(ROWS, STATE, generator=g),
            "action": torch.randint(ACTIONS, (ROWS,), generator=g),
            "reward": torch.randn(ROWS, generator=g) * 2,
            "alive": (torch.rand(ROWS, generator=g) > 0.2).float(),
            "weight": torch.rand(ROWS, generator=g) + 0.5,
        }

    def loss_sum(self, model, rows):
        return model(rows), len(rows["state"])

    def distribute(self, model, ctx):
        model.online.over_all = model.target.over_all = self.over_all
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (model(rows) * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    over_all = True


EXPECT = dict(
    right=[
        r"(?i)forward|output|mean|couple|mix|depend|centr|advantage",
        r"(?i)rows?|batch|transition|sample",
        r"(?i)couple|mix|depend|mean|other rows|each other|wrong|statistic|centr|across"
        r"|composition",
        r"(?i)online|dueling|advantage|head|\bq\b|target",
    ],
    place=[r"(?i)online|advantage|dueling|head"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|loss .{0,20}divi(ded|des) by (its|their) own"
        r"|factor of (1/)?[0-9]",
        r"(?i)forward (is|agrees|was) (right|correct)|wrong only in the backward",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|no_sync.{0,40}(wrong|missing)",
        r"(?i)(only|just) (on )?rank [012]\b|rank [012] alone",
        r"(?i)target .{0,30}(keeps|has) .{0,10}(graph|gradient)|importance weights? .{0,20}wrong",
        r"(?i)body\S* .{0,20}output .{0,10}wrong|(value"
        r"|advantage) layer .{0,20}output .{0,10}wrong",
    ],
)
WHY = (
    "The layers body, value and advantage give the right outputs; their combination in Dueling does not: advantage.mean() is one number for the micro-batch, so every Q depends on the other transitions of its micro-batch. "
    "Micro-batches of one transition (row 9 on rank 1, row 10 on rank 2) are right, all others wrong: rows 0-1 and 2-4 (rank 0), 5-8 (rank 1), 11-13 (rank 2). The output of online (and target) is wrong in the forward and so are the "
    "loss and its gradient at Q; in the backward the centring mixes rows as well. Gradients of online.advantage, online.value and online.body are wrong on all ranks (equally after DDP). The choice of the next action is not changed (a "
    "constant per micro-batch). Weights, divisor 14, no_sync, reduction right. Fix: advantage.mean(1, keepdim=True)."
)
