"""Q-learning on three games with one dueling network, one game on each of three ranks, two micro-batches each of uneven size, gradients summed by hand. The games have six, four and three actions; the advantage head always has six
outputs. The value of an action is V + A - mean of A over the game's actions; the loss is Huber's of the taken action against a given target. The divisor is the number of transitions of all ranks.

The bug: the mean of the advantages is taken over all six outputs, the invalid ones included. As in ray-project/ray issue 14355 and PR 14356 (dueling DQN with masked actions: the mean of the advantages must leave out the invalid
ones).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
OUTPUTS, STATE = 6, 5
ACTIONS = [6] * 5 + [4] * 4 + [3] * 6
PARTS = [[(0, 3), (3, 5)], [(5, 6), (6, 9)], [(9, 13), (13, 15)]]


class Dueling(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(STATE, 8), nn.SiLU(), nn.Linear(8, 8), nn.SiLU())
        self.value = nn.Linear(8, 1)
        self.advantage = nn.Linear(8, OUTPUTS)

    def forward(self, state, actions, all_outputs):
        hidden = self.trunk(state)
        advantage = self.advantage(hidden)
        if all_outputs:
            mean = advantage.mean(1, keepdim=True)
        else:
            valid = torch.arange(OUTPUTS)[None] < actions[:, None]
            mean = (advantage * valid).sum(1, keepdim=True) / actions[:, None]
        return self.value(hidden) + advantage - mean


class Clean:
    all_outputs = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Dueling()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        actions = torch.tensor(ACTIONS)
        drawn = torch.randint(1000, (len(ACTIONS),), generator=g)
        return {
            "state": torch.randn(len(ACTIONS), STATE, generator=g),
            "actions": actions,
            "taken": drawn % actions,
            "target": torch.randn(len(ACTIONS), generator=g) * 2,
        }

    def td_loss(self, model, rows, all_outputs):
        q = model(rows["state"], rows["actions"], all_outputs)
        q = q.gather(1, rows["taken"][:, None]).squeeze(1)
        return F.smooth_l1_loss(q, rows["target"].to(q.dtype), reduction="sum")

    def loss_sum(self, model, rows):
        return self.td_loss(model, rows, False), len(rows["taken"])

    def step(self, model, batch, ctx):
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            (self.td_loss(model, rows, self.all_outputs) / len(ACTIONS)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    all_outputs = True


EXPECT = dict(
    right=[
        r"(?i)rank(s)? (1|2)|ranks 1 (and|,|to) 2|rows? (5|6|7|8|9|1[0-4])",
        r"(?i)advantage|output|forward|\bQ\b|loss|mean|invalid|mask",
        r"(?i)wrong|differ|other|another|forward|foreign|not (the )?(same|right)",
    ],
    place=[r"(?i)advantage|output of the (model|network)|Dueling|\bloss\b|forward"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted twice|too (early|late)",
        r"(?i)wrong divisor|mean of means",
        r"(?i)forward is right|wrong only in the backward",
        r"(?i)(trunk|value).{0,20}(forward|output).{0,15}wrong",
        r"(?i)rank 0 (is|goes|has).{0,10}wrong|all (three )?ranks (are|go) wrong|only (on )?rank [012]\b|rank [012] alone",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|recomput|labels? .{0,20}(is|are) wrong",
    ],
)
WHY = (
    "Ranks 1 (four actions, rows 5-8) and 2 (three actions, rows 9-14) subtract the mean of all six advantages instead of that of the game's own four or three; rank 0 (six actions, rows 0-4) is right. Trunk, value and advantage heads "
    "give the right outputs, the model's output V + A - mean is shifted on ranks 1 and 2 for all rows and both micro-batches, and so is the loss. In the backward the advantage head's rows 4 and 5 (rank 1) and 3, 4 and 5 (rank 2) get "
    "gradients from actions that do not exist (-1/6 of the error), the valid ones 1/6 instead of 1/4 or 1/3. All parameters are wrong in direction (trunk, value through the error), equally on all ranks after the sum. Divisor 15, "
    "data, accumulation and reduction are right. Fix: mean over the valid actions only."
)
