"""A graph network with a table of node vectors; only the rows that were looked up travel between the ranks.
After sql-machine-learning/elasticdl PR 1588 and horovod issue 341 (gathered indices occur more than once): rows that several ranks
send are assigned, not added.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"graph": {"axes": {"dp": 4}}}}
ROWS, NODES, FAN, WIDTH, CLASSES = 14, 29, 3, 6, 4


class Sage(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own, self.near = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, own, near, there):
        mean = (near * there[..., None]).sum(-2) / there.sum(-1, keepdim=True).clamp(min=1)
        return self.own(own) + self.near(mean)


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.nodes = nn.Embedding(NODES, WIDTH)
        self.conv1, self.conv2 = Sage(WIDTH, 9), Sage(9, CLASSES)

    def forward(self, rows):
        """Neighbours of neighbours, then neighbours; -1 is nobody."""
        seed, near, far = rows["seed"], rows["near"], rows["far"]
        far_x, near_x = self.nodes(far.clamp(min=0)), self.nodes(near.clamp(min=0))
        near_h = F.relu(self.conv1(near_x, far_x, far >= 0))
        seed_h = F.relu(self.conv1(self.nodes(seed), near_x, near >= 0))
        return self.conv2(seed_h, near_h, near >= 0)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Graph()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        near = torch.randint(-2, NODES, (ROWS, FAN), generator=g).clamp(min=-1)
        far = torch.randint(-4, NODES, (ROWS, FAN, FAN), generator=g).clamp(min=-1)
        return {
            "seed": torch.randint(NODES, (ROWS,), generator=g),
            "near": near,
            "far": far.masked_fill(near[..., None] < 0, -1),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows), rows["y"], reduction="sum"), len(rows["y"])

    def put(self, grad, index, values):
        grad.index_add_(0, index, values)

    def reduce_rows(self, param, touched, ctx):
        index = touched.unique()
        sizes = [torch.empty(1, dtype=torch.long) for _ in range(ctx.world_size)]
        dist.all_gather(sizes, torch.tensor([len(index)]))
        most = int(max(sizes))
        sent = index.new_zeros(most)
        sent[: len(index)] = index
        values = param.grad.new_zeros(most, param.shape[1])
        values[: len(index)] = param.grad[index]
        all_index = [torch.empty_like(sent) for _ in sizes]
        all_values = [torch.empty_like(values) for _ in sizes]
        dist.all_gather(all_index, sent)
        dist.all_gather(all_values, values)
        param.grad.zero_()
        for size, i, v in zip(sizes, all_index, all_values, strict=True):
            self.put(param.grad, i[:size], v[:size])

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / ROWS).backward()
        touched = torch.cat([mine[k].flatten() for k in ("seed", "near", "far")]).clamp(min=0)
        for name, param in model.named_parameters():
            if name == "nodes.weight":
                self.reduce_rows(param, touched, ctx)
            else:
                dist.all_reduce(param.grad)


class Buggy(Clean):
    def put(self, grad, index, values):
        grad[index] = values


EXPECT = dict(
    right=[
        r"nodes|embed|table",
        r"overwrit|last|replac|assign|lost|lose|missing|miss|lacks?|only (one|a single|the|some|rank|part)|partial|some rows|rows? (that|which|of "
        r"the table)|not (add|sum|accumul)|duplicat|own rows|several ranks|dropped|rank 3|highest rank",
    ],
    place=[r"nodes|embed|table", r"rows?|ranks?|index"],
    wrong=[
        r"conv\d\S* (is|are|has|have) (a )?wrong",
        r"(reduced|counted|summed) (twice|again)",
        r"mean of (the )?means",
        r"forward (pass )?(is|was) wrong",
        r"ranks (disagree|hold different|differ)",
    ],
)
WHY = (
    "In nodes.weight a row that several ranks looked up keeps only the gradient of the last (highest) rank that sent it; the other ranks' "
    "parts of that row are overwritten. Rows touched on one rank and all other parameters are right; all ranks agree."
)
