"""Traffic forecasting on a road graph that is cut over ranks; each part carries the neighbours of its nodes as ghosts. Modelled on the
questions to PyTorch Geometric and DistDGL on `out[:batch.batch_size]` (the loss is for the seed nodes, the sampled neighbours only
feed them): the ghosts are left in the loss.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"traffic": {"axes": {"part": 3}}}}
ROWS, NODES, FEATURES, WIDTH = 5, 14, 4, 8


def road_links():
    """Share of each neighbour in the mean of a node: a ring with some chords."""
    links = torch.eye(NODES)
    for a in range(NODES):
        links[a, (a + 1) % NODES] = links[(a + 1) % NODES, a] = 1
    for a, b in ((0, 6), (2, 9), (5, 12)):
        links[a, b] = links[b, a] = 1
    return links / links.sum(1, keepdim=True)


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.near = nn.Linear(FEATURES, WIDTH), nn.Linear(FEATURES, WIDTH, bias=False)
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x, links):
        x = F.relu(self.norm(self.own(x) + self.near(links.to(x.dtype) @ x)))
        return self.out(x)[..., 0]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Forecast()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, NODES, FEATURES, generator=g),
            "speed": torch.randn(ROWS, NODES, generator=g),
            "measured": torch.rand(ROWS, NODES, generator=g) < 0.7,
        }

    @staticmethod
    def node_loss(guess, rows):
        return (
            F.smooth_l1_loss(guess, rows["speed"], reduction="none") * rows["measured"]
        ).sum(), rows["measured"].sum()

    def loss_sum(self, model, rows):
        return self.node_loss(model(rows["x"], road_links()), rows)

    def seeds(self, own, nodes):
        """How many of the part's nodes, which stand first, belong to the loss."""
        return len(own)

    def step(self, model, batch, ctx):
        links = road_links()
        own = torch.arange(NODES).tensor_split(ctx.world_size)[ctx.rank]
        near = (links[own] > 0).any(0)
        near[own] = False
        nodes = torch.cat([own, near.nonzero()[:, 0]])
        guess = model(batch["x"][:, nodes], links[nodes][:, nodes])
        n = self.seeds(own, nodes)
        loss, count = self.node_loss(
            guess[:, :n], {k: batch[k][:, nodes[:n]] for k in ("speed", "measured")}
        )
        dist.all_reduce(count)
        (loss / count).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def seeds(self, own, nodes):
        return len(nodes)


EXPECT = dict(
    right=[
        r"loss|output|node|position|near|forward|coefficient|weigh|normali[sz]|count",
        r"more|ghost|neighbour|extra|additional|twice|several|again|other ranks|too (many|large|small)|overlap|count|wrong|differ|"
        r"unequal|not (proportional|explained)|shape|incomplete",
    ],
    place=[r"(all|every|each) ranks?|ranks? \W?[012]", r"loss|out|near|count|normali[sz]"],
    wrong=[
        r"(never|not) (been )?(all.?)?(reduced|summed|averaged)",
        r"mean of (the )?(rank |ranks' )?means",
        r"detach|no_grad|lost its graph",
        r"(missing|dropped|lost|left out) (node|row|rank)",
        r"gradients? (is|are|was|were) reduced (twice|again)",
        r"(only|just) (the )?(own|near|norm|out)\S* (is|are) wrong",
    ],
)
WHY = (
    "The loss and its count also take the ghost nodes, whose outputs are computed from an incomplete neighbourhood: nodes at the cuts "
    "count several times, with wrong outputs in their second copies, and all others weigh less because the count is larger. All "
    "parameters are wrong on all ranks alike; the outputs of the own nodes are right."
)
