"""A graph network with the nodes cut over two machines of three ranks; features of all nodes are gathered in two
stages, over the machines first. After DeepSpeed MiCS' hierarchical all-gather (inter-node, then intra-node, then a
reordering of the parts) and FAULTS C16 (which rank holds what): the reordering is left out.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"inter": 2, "intra": 3}}}}
GRAPHS, NODES, FEATURES, WIDTH, CLASSES = 5, 18, 5, 7, 3


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)], None


class GraphLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.own, self.neighbours = nn.Linear(width, WIDTH), nn.Linear(width, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, adjacency, everyone):
        return self.norm(F.elu(self.own(x) + self.neighbours(adjacency @ everyone(x))))


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(GraphLayer(FEATURES if i == 0 else WIDTH) for i in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, adjacency, everyone=lambda x: x):
        for layer in self.layers:
            x = layer(x, adjacency, everyone)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return GraphNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        links = (torch.rand(GRAPHS, NODES, NODES, generator=g) < 0.3).float()
        links = ((links + links.mT) > 0).float() + torch.eye(NODES)
        labelled = torch.rand(GRAPHS, NODES, generator=g) < 0.6
        labels = torch.randint(CLASSES, (GRAPHS, NODES), generator=g)
        return {
            "x": torch.randn(GRAPHS, NODES, FEATURES, generator=g),
            "adjacency": links / links.sum(-1, keepdim=True),
            "labels": labels.masked_fill(~labelled, -100),
        }

    @staticmethod
    def node_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        loss = self.node_loss(model(rows["x"], rows["adjacency"]), rows["labels"])
        return loss, (rows["labels"] != -100).sum()

    def order(self, parts):
        """(intra, inter, graphs, nodes, width) -> by machine, then by rank of the machine"""
        return parts.transpose(0, 1)

    def step(self, model, batch, ctx):
        def everyone(x):
            machines = Gathered.apply(x, ctx.group("inter"))
            parts = Gathered.apply(machines, ctx.group("intra"))
            return torch.cat(list(self.order(parts).flatten(0, 1)), dim=1)

        share = ctx.coords["inter"] * ctx.axes["intra"] + ctx.coords["intra"]
        mine = {k: v.tensor_split(ctx.world_size, dim=1)[share] for k, v in batch.items()}
        loss = self.node_loss(model(mine["x"], mine["adjacency"], everyone), mine["labels"])
        (loss / (batch["labels"] != -100).sum()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def order(self, parts):
        return parts


EXPECT = dict(
    right=[
        r"forward|output|activation|input of|values? (of|at|in)|order|permut|wrong nodes|layout",
        r"layers\.[01]|neighbour|aggregat|message|gather|everyone",
    ],
    place=[r"layers\.0", r"neighbours", r"gather", r"(all|every|each) ranks?|ranks? \W?[0-5]"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (right|exact|correct)$",
        r"averag\w+ (instead|where)",
        r"(layers\.0\.own|head)\S* .{0,20}first wrong",
    ],
)
WHY = (
    "After a gather over the machines and then over the ranks of a machine, the parts lie in the order 0 3 1 4 2 5; without the "
    "reordering each rank multiplies its rows of the adjacency with the features of other nodes. The forward is wrong from "
    "layers.0.neighbours on, on all six ranks; all gradients but the parts that depend on nothing of it are wrong."
)
