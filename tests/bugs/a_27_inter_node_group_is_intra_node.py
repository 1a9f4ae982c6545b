"""A two-level all-reduce: inside a node, then across nodes, with groups built by hand. After
FAULTS class C16 (process groups of hierarchical reduction).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"node": 2, "local": 2}}}}

ROWS, INPUTS, WIDTH, CLASSES = 10, 6, 8, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def own_group(lists, rank):
    groups = [(ranks, dist.new_group(ranks)) for ranks in lists]
    return next(group for ranks, group in groups if rank in ranks)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["x"])

    def distribute(self, model, ctx):
        per_node, world = ctx.axes["local"], ctx.world_size
        intra = [list(range(i, i + per_node)) for i in range(0, world, per_node)]
        self.intra = own_group(intra, ctx.rank)
        self.inter = own_group(self.inter_ranks(per_node, world), ctx.rank)
        return model

    def inter_ranks(self, per_node, world):
        return [list(range(i, world, per_node)) for i in range(per_node)]

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / ROWS).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=self.intra)
            dist.all_reduce(param.grad, group=self.inter)


class Buggy(Clean):
    def inter_ranks(self, per_node, world):
        nodes = world // per_node
        return [list(range(i * nodes, (i + 1) * nodes)) for i in range(per_node)]


EXPECT = dict(
    right=[
        (
            r"missing|lost|not (reduced|summed)|never|without|only|own|left out|(wrong"
            r"|other) (group|peers)|same group"
        ),
        r"node|ranks?\b|rows|group",
    ],
    place=[r"node|ranks?\b|rows|group|local"],
    wrong=[r"mean of (the )?means", r"micro-?batch.{0,30}(lost|dropped)", r"averag"],
)

WHY = (
    "The groups across nodes are the groups inside a node once more: the node's sum is "
    "doubled and the other node's rows are missing."
)
