"""A recurrent actor-critic with lambda-returns. After google-deepmind/rlax PR 161 (issue 28) and datawhalechina/easy-rl PR 117
("TD target does not have detach()"): gradients flow through the bootstrapped target.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"learner": {"axes": {"dp": 4}}}}
ROWS, STEPS, SENSORS, ACTIONS, WIDTH = 10, 6, 5, 4, 8
DISCOUNT, LAMBDA, CRITIC, ENTROPY = 0.9, 0.8, 0.5, 0.05


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.memory = nn.Linear(SENSORS, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.policy = nn.Linear(WIDTH, ACTIONS)
        self.value = nn.Sequential(nn.Linear(WIDTH, 7), nn.ELU(), nn.Linear(7, 1))

    def forward(self, x):
        h = self.memory(torch.tanh(self.encode(x)))[0]
        return self.policy(h).log_softmax(-1), self.value(h)[..., 0]


def lambda_returns(reward, goes_on, values):
    """values has one step more than reward."""
    last, returns = values[:, -1], []
    for t in reversed(range(reward.shape[1])):
        mixed = (1 - LAMBDA) * values[:, t + 1] + LAMBDA * last
        last = reward[:, t] + DISCOUNT * mixed * goes_on[:, t]
        returns.append(last)
    return torch.stack(returns[::-1], dim=1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        names = "actor", "critic", "entropy"
        self.terms = {n: lambda m, r, n=n: (self.parts(m, r)[n], r["mask"].sum()) for n in names}

    def build(self):
        torch.manual_seed(self.seed)
        return Agent()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(2, STEPS + 1, (ROWS, 1), generator=g)
        steps = torch.arange(STEPS)
        return {
            "x": torch.randn(ROWS, STEPS + 1, SENSORS, generator=g),
            "action": torch.randint(ACTIONS, (ROWS, STEPS), generator=g),
            "reward": torch.randn(ROWS, STEPS, generator=g),
            "goes_on": steps != lengths - 1,
            "mask": steps < lengths,
        }

    @staticmethod
    def constant_target(rows, values):
        return lambda_returns(rows["reward"], rows["goes_on"], values.detach())

    def parts(self, model, rows, target_of=None):
        logp, values = model(rows["x"])
        target = (target_of or self.constant_target)(rows, values)
        logp, now, mask = logp[:, :-1], values[:, :-1], rows["mask"]
        advantage = (target - now).detach()
        taken = logp.gather(-1, rows["action"][..., None])[..., 0]
        return {
            "actor": -(taken * advantage * mask).sum(),
            "critic": CRITIC * (F.mse_loss(now, target, reduction="none") * mask).sum(),
            "entropy": ENTROPY * ((logp.exp() * logp).sum(-1) * mask).sum(),
        }

    def loss_sum(self, model, rows):
        return sum(self.parts(model, rows).values()), rows["mask"].sum()

    def target(self, rows, values):
        with torch.no_grad():
            return lambda_returns(rows["reward"], rows["goes_on"], values)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        steps = mine["mask"].sum()
        dist.all_reduce(steps)
        (sum(self.parts(model, mine, self.target).values()) / steps).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def target(self, rows, values):
        return lambda_returns(rows["reward"], rows["goes_on"], values)


EXPECT = dict(
    right=[
        r"critic|value|target|return|bootstrap|\btd\b",
        r"detach|stop.?grad|no_grad|extra|additional|flows?|through the target|graph|constant|differentiat|backward|unexplained|not "
        r"(accounted|explained|(a )?multiple)|residual|leak|second path|direction",
    ],
    place=[r"critic|value", r"target|return|bootstrap", r"term"],
    wrong=[
        r"(actor|entropy)\S* (term )?(is|has|gets) (wrong|divided|scaled|lost)",
        r"policy\.\S+ (is|has) (a )?wrong",
        r"forward (pass )?(is|was) wrong",
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"(reduced|counted|divided) (twice|again)",
        r"rows? (is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "The lambda-returns of the critic term are not detached: its gradient also runs through the target, on all ranks and rows. "
    "value.*, memory.* and encode.* are wrong; policy.* is right, and so is the forward."
)
