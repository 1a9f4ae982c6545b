"""Node classification with neighbour sampling (GraphSAGE with mean aggregation, all neighbours, two hops) on two ranks with three micro-batches of seed nodes each; gradients summed by hand. A micro-batch is a subgraph: its nodes (seeds and
two hops of neighbours) are numbered anew, the net runs on it, and the first rows of the result belong to the seeds. The divisor is the number of seeds of the whole batch.

The bug: the nodes of the subgraph come from `torch.unique`, which sorts them; the seeds are then not the first rows, but `out[:len(seeds)]` is still read for them. As in pyg-team/pytorch_geometric issue 9924 (seed nodes not the first nodes
in a NeighborLoader batch), compare issue 7372 there.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
NODES, FEATURES, WIDTH, CLASSES = 20, 4, 6, 4
PARTS = [[(0, 2), (2, 3), (3, 6)], [(6, 7), (7, 9), (9, 11)]]
SEEDS = [13, 4, 0, 17, 9, 2, 11, 6, 19, 8, 15]


def edges():
    g = torch.Generator().manual_seed(5)
    target = torch.arange(NODES).repeat_interleave(2)
    source = torch.randint(NODES, (2 * NODES,), generator=g)
    return torch.stack([source, target])


class Sage(nn.Module):
    def __init__(self, wide, narrow):
        super().__init__()
        self.own, self.others = nn.Linear(wide, narrow), nn.Linear(wide, narrow, bias=False)

    def forward(self, x, edge):
        total = torch.zeros_like(x).index_add(0, edge[1], x[edge[0]])
        degree = torch.bincount(edge[1], minlength=len(x)).clamp(min=1)
        return self.own(x) + self.others(total / degree[:, None])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Sage(FEATURES, WIDTH), Sage(WIDTH, CLASSES)
        self.register_buffer("feature", torch.randn(NODES, FEATURES))

    def forward(self, nodes, edge):
        return self.second(F.elu(self.first(self.feature[nodes], edge)), edge)


def subgraph(seeds, edge, sort):
    near = torch.isin(edge[1], seeds)
    inner = torch.cat([seeds, edge[0][near]])
    kept = edge[:, torch.isin(edge[1], inner)]
    found = torch.cat([inner, kept[0]])
    if sort:
        nodes = torch.unique(found)
    else:
        nodes = torch.tensor(list(dict.fromkeys(found.tolist())))
    number = torch.full((NODES,), -1)
    number[nodes] = torch.arange(len(nodes))
    return nodes, number[kept]


class Clean:
    sort = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "node": torch.tensor(SEEDS),
            "label": torch.randint(CLASSES, (len(SEEDS),), generator=g),
        }

    def loss_sum(self, model, rows):
        out = model(torch.arange(NODES), edges())[rows["node"]]
        return F.cross_entropy(out, rows["label"], reduction="sum"), len(rows["label"])

    def step(self, model, batch, ctx):
        for low, high in PARTS[ctx.rank]:
            seeds, label = batch["node"][low:high], batch["label"][low:high]
            nodes, edge = subgraph(seeds, edges(), self.sort)
            out = model(nodes, edge)[: len(seeds)]
            loss = F.cross_entropy(out, label, reduction="sum")
            (loss / len(batch["label"])).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    sort = True


EXPECT = dict(
    right=[
        r"(?i)rows?|node|seed|output|logits|label|micro.?batch|input",
        r"(?i)other|wrong|foreign|order|sort|shift|permut|swap|mis|not (the )?(own|right)|"
        r"different|instead",
    ],
    place=[r"(?i)row|node|seed|label|output|logits|loss|input|micro.?batch"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|too (early|late)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor (of "
        r")?(1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|missing)",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)degree|aggregation .{0,20}wrong|backward of .{0,30} is wrong",
    ],
)
WHY = (
    "On both ranks, in the micro-batches, the subgraph's nodes are in ascending order, so out[:k] are the outputs of the k smallest node numbers of the subgraph, not of the seeds; they are scored against the seeds' labels. A seed is "
    "right only "
    "by chance (node 0 in rank 0's micro-batch 1, which is row 2 alone, is the smallest there and right). The features, the renumbered edges and the aggregation fit the sorted nodes; so the net is right on every node, apart from nodes of "
    "the "
    "second hop, whose neighbours are not in the subgraph and which may now be read. All parameters are wrong, equally on both ranks after the sum. Divisor 11 and reduction are right. Fix: keep the seeds first (order of first occurrence)."
)
