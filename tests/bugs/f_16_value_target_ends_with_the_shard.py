"""A critic with temporal-difference targets r + gamma V(next), episodes cut along time over ranks, DDP. After FAULTS C19-style
shard boundaries and TRL/verl value targets under sequence parallelism: the last step of each part is bootstrapped with
zero, as if the episode ended there, instead of with the next rank's first value.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"critic": {"axes": {"sp": 3}}}}
ROWS, STEPS, OBSERVED, WIDTH, GAMMA = 5, 10, 4, 9, 0.9


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(OBSERVED, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        )
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.value(torch.tanh(self.body(x)))[..., 0]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        model = Critic()
        nn.init.constant_(model.value.bias, 0.8)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(3, STEPS + 1, (ROWS, 1), generator=g)
        lengths[1] = STEPS
        return {
            "seen": torch.randn(ROWS, STEPS, OBSERVED, generator=g),
            "reward": torch.randn(ROWS, STEPS, generator=g),
            "alive": torch.arange(STEPS) < lengths - 1,
            "mask": torch.arange(STEPS) < lengths,
        }

    @staticmethod
    def td_loss(values, following, rows):
        after = torch.cat([values[:, 1:], following[:, None]], dim=1).detach()
        target = rows["reward"] + GAMMA * after * rows["alive"]
        return ((values - target).square() * rows["mask"]).sum()

    def loss_sum(self, model, rows):
        values = model(rows["seen"])
        return self.td_loss(values, torch.zeros_like(values[:, 0]), rows), rows["mask"].sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def following(self, values, ctx):
        firsts = [torch.empty(len(values), dtype=values.dtype) for _ in range(ctx.world_size)]
        dist.all_gather(firsts, values[:, 0].detach().contiguous())
        return torch.stack([*firsts[1:], torch.zeros_like(firsts[0])])[ctx.rank]

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size, dim=1)[ctx.rank] for k, v in batch.items()}
        values = model(mine["seen"])
        loss = self.td_loss(values, self.following(values, ctx), mine)
        (loss * ctx.world_size / batch["mask"].sum()).backward()


class Buggy(Clean):
    def following(self, values, ctx):
        return torch.zeros_like(values[:, 0])


EXPECT = dict(
    right=[
        r"loss|target|bootstrap|temporal|next value|end of|boundar|last (step|position)|edge|gradient (of|at|into) (the )?(values?|output)|incoming gradient|backward",
        r"ranks? \W?[01]\b|ranks 0 (and|,)|not (on )?rank 2|boundar|end of (each|every|the|a) (shard|part|chunk|slice|rank)|last (step|position)|target|positions? \W?[36]\b|shard",
    ],
    place=[r"ranks? \W?[01]\b", r"target|loss", r"value", r"positions?|steps?"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"(output|forward) of (the )?(body|value|critic)\S* (is|was) wrong",
        r"divided (twice|by (the )?(local|own))",
        r"rows? .{0,30}(read twice|dropped)",
    ],
)
WHY = (
    "On ranks 0 and 1 the target of the last step of the part (steps 3 and 6 of 10) lacks gamma times the next value, which lives on the next rank; rank 2 is right. The network's outputs are right, the loss and its gradient at "
    "those steps are not, and so all parameters (after DDP on all ranks) are wrong by direction."
)
