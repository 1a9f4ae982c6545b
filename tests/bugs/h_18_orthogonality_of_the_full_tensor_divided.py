"""FSDP2 with a penalty on the distance of the mixing weights from orthogonal ones, computed from full_tensor(). After the reports on
regularisers over sharded parameters (pytorch and torchtitan issues on DTensor.full_tensor() and its gradient; FAULTS C06 and C10):
every rank adds the penalty, so its author divides it by the ranks; but the gradient of full_tensor() is cut, not summed.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, INPUTS, WIDTH, CLASSES, MICRO_BATCHES, STRENGTH = 14, 6, 4, 8, 3, 2, 0.05


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)
        self.back = nn.Linear(10, WIDTH)

    def forward(self, x):
        state, states = torch.zeros_like(x[:, 0]), []
        for step in x.unbind(1):
            state = torch.tanh(step + self.mix(state))
            states.append(state)
        x = torch.stack(states, 1)
        return x + self.back(F.relu(self.inner(self.norm(x))))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def penalty(model):
    total = 0.0
    for block in model.blocks:
        weight = block.mix.weight
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        total = total + (weight @ weight.T - torch.eye(WIDTH, dtype=weight.dtype)).square().sum()
    return STRENGTH * total


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "classes": self.class_sum,
            "orthogonality": lambda model, rows: (penalty(model), 1),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return Recurrent()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        kinds = torch.randint(CLASSES, (ROWS, LENGTH), generator=g)
        return {
            "x": torch.randn(ROWS, LENGTH, INPUTS, generator=g),
            "kinds": kinds.masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    @staticmethod
    def class_sum(model, rows):
        loss = F.cross_entropy(model(rows["x"]).mT, rows["kinds"], reduction="sum")
        return loss, (rows["kinds"] != -100).sum()

    def loss_sum(self, model, rows):
        loss, count = self.class_sum(model, rows)
        return loss + count * penalty(model), count

    def distribute(self, model, ctx):
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def penalty_share(self, model, ctx):
        return penalty(model)

    def step(self, model, batch, ctx):
        count = (batch["kinds"] != -100).sum()
        self.penalty_share(model, ctx).backward()
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for i in range(MICRO_BATCHES):
            loss, _ = self.class_sum(
                model, {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            )
            (loss / count).backward()


class Buggy(Clean):
    def penalty_share(self, model, ctx):
        return penalty(model) / ctx.world_size


EXPECT = dict(
    right=[
        r"orthogonal|penalty|\bmix\b|regulari",
        r"1/3|\b0\.33|third|divided|too (small|weak|little)|world.?size|number of ranks|/ ?3\b|factor",
    ],
    place=[r"mix", r"orthogonal|penalty"],
    wrong=[
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"(start|norm|inner|back|out)\.\S* (is|are|has|have) (a )?wrong",
        r"classes( term| loss)?\S* (is|are|was|were) (divided|scaled|wrong|missing)",
        r"(orthogonality|penalty)\S* (is|was) (missing|lost|dropped|absent|left out)",
        r"mean of (the )?(rank |ranks' )?means",
    ],
)
WHY = (
    "The backward of full_tensor() gives each rank its slice of the gradient without a sum over ranks, so the penalty divided by the 3 "
    "ranks reaches blocks.*.mix.weight with 1/3 of its strength, on all ranks. "
    "The classification term and all other parameters are right."
)
