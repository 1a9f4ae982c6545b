"""Q-learning with prioritised replay under DDP. Modelled on the reports on prioritised replay with several learners (RLlib, Acme,
dopamine ports: weights are divided by the largest of the batch): with the batch split over learners, each divides by the largest
weight among its own rows.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

TOPOLOGY = {"pools": {"learner": {"axes": {"dp": 3}}}}
ROWS, STATE, ACTIONS = 14, 6, 5


class Dueling(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(STATE, 12), nn.ReLU(), nn.LayerNorm(12))
        self.value, self.advantage = nn.Linear(12, 1), nn.Linear(12, ACTIONS)

    def forward(self, state):
        x = self.body(state)
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(-1, keepdim=True)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.top = self.batch()["weight"].max().item()

    def build(self):
        torch.manual_seed(self.seed)
        return Dueling()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        priority = torch.rand(ROWS, generator=g) + 0.05
        return {
            "state": torch.randn(ROWS, STATE, generator=g),
            "action": torch.randint(ACTIONS, (ROWS,), generator=g),
            "target": 2 * torch.randn(ROWS, generator=g),
            "weight": (ROWS * priority / priority.sum()) ** -0.6,
        }

    @staticmethod
    def errors(model, rows):
        taken = model(rows["state"]).gather(1, rows["action"][:, None])[:, 0]
        return F.huber_loss(taken, rows["target"], reduction="none")

    def loss_sum(self, model, rows):
        return (self.errors(model, rows) * rows["weight"] / self.top).sum(), len(rows["state"])

    def distribute(self, model, ctx):
        self.learner = DDP(model)
        return model

    def normalised(self, weight):
        top = weight.max()
        dist.all_reduce(top, dist.ReduceOp.MAX)
        return weight / top

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss = (self.errors(self.learner, mine) * self.normalised(mine["weight"])).sum()
        (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    def normalised(self, weight):
        return weight / weight.max()


EXPECT = dict(
    right=[
        r"ranks?|rows|share|learner",
        r"weigh|factor|scale|times|too (large|much)|counted|coefficient|normali[sz]|divid",
        r"differ|own|local|unequal|uneven|unlike|each|two of|ranks? \W?[012]|per.?rank|different",
    ],
    place=[r"ranks? \W?[012]", r"rows", r"(all|every) parameters?|each rank|every rank"],
    wrong=[
        r"(never|not) (been )?(all.?)?(reduced|summed|averaged)",
        r"forward (pass )?(is|was) wrong",
        r"(reduced|counted|summed) (twice|again|3 times|three times)",
        r"(sum|average|averag\w+) (instead|where)",
        r"missing|dropped|lost",
        r"(only|just) (the )?(value|advantage|body)\b",
    ],
)
WHY = (
    "Each learner divides its replay weights by the largest of its own rows instead of the largest of the batch: the rows of each rank "
    "are multiplied by (global maximum / own maximum), which is 1 on the rank that has the maximum and above 1 on the other two. All "
    "parameters are wrong, equally on all ranks."
)
