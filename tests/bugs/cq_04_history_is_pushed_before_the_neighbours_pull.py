"""A graph network on clusters of a large graph with historical embeddings (GNNAutoScale), DDP over
two ranks with three and two of five clusters; each cluster is a micro-batch.

Neighbours within the cluster are computed, those in other clusters are pulled from the table of
embeddings that the last epoch has left. After its forward a cluster pushes its own embeddings
for the next epoch.

Bug: the push goes into the table from which the next cluster of this step pulls, so that later
clusters of a rank see fresh embeddings where the objective has the old ones. After histories that
are updated in place while gradients are accumulated.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
CLUSTERS, SIZE, FEATURES, H, CLASSES = 5, 4, 3, 6, 4


class ClusterNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(FEATURES, H)
        self.own = nn.Linear(H, H)
        self.near = nn.Linear(H, H, bias=False)
        self.head = nn.Linear(H, CLASSES)

    def forward(self, x, within, across, table):
        """x (.., size, F), within (.., size, size), across (.., size, nodes),
        table (.., nodes, H)"""
        h = torch.tanh(self.enter(x))
        mean = within @ h + across @ table
        return self.head(h + F.elu(self.own(h) + self.near(mean))), h


class History:
    """the embeddings of the last epoch to pull from; those pushed come into force afterwards"""

    def __init__(self, table):
        self.table, self.pushed = table.clone(), table.clone()

    def pull(self):
        return self.table

    def push(self, cluster, h):
        self.pushed[cluster * SIZE : (cluster + 1) * SIZE] = h.detach()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 44)
        return ClusterNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 440)
        nodes = CLUSTERS * SIZE
        edges = torch.rand(nodes, nodes, generator=g) < 0.35
        edges = (edges | edges.T) & ~torch.eye(nodes, dtype=torch.bool)
        weights = edges / edges.sum(1, keepdim=True).clamp(min=1)
        cluster = torch.arange(nodes) // SIZE
        same = cluster[:, None] == cluster[None]
        across = (weights * ~same).view(CLUSTERS, SIZE, nodes)
        blocks = weights.view(CLUSTERS, SIZE, CLUSTERS, SIZE)
        within = torch.stack([blocks[c, :, c] for c in range(CLUSTERS)])
        past = torch.randn(nodes, H, generator=g)
        label = torch.randint(CLASSES, (CLUSTERS, SIZE), generator=g)
        label[torch.rand(CLUSTERS, SIZE, generator=g) < 0.2] = -100
        return {
            "x": torch.randn(CLUSTERS, SIZE, FEATURES, generator=g),
            "within": within,
            "across": across,
            "past": past.expand(CLUSTERS, nodes, H).contiguous(),
            "label": label,
        }

    def loss_sum(self, model, rows):
        out, _ = model(rows["x"], rows["within"], rows["across"], rows["past"])
        label = rows["label"].flatten()
        loss = F.cross_entropy(out.flatten(0, 1), label, reduction="sum")
        return loss, (label != -100).sum()

    def history(self, table):
        return History(table)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        dp = ctx.axes["dp"]
        own = torch.arange(CLUSTERS).tensor_split(dp)[ctx.coords["dp"]].tolist()
        labelled = (batch["label"] != -100).sum()
        history = self.history(batch["past"][0])
        for c in own:
            last = c == own[-1]
            with contextlib.nullcontext() if last else model.no_sync():
                x, within, across = (batch[k][c] for k in ("x", "within", "across"))
                out, h = model(x, within, across, history.pull())
                history.push(c, h)
                loss = F.cross_entropy(out, batch["label"][c], reduction="sum")
                (loss * dp / labelled).backward()
        self.share(history, own, ctx)

    def share(self, history, own, ctx):
        """for the next epoch every rank gets what the others have pushed"""
        fresh = torch.zeros_like(history.pushed)
        for c in own:
            nodes = slice(c * SIZE, (c + 1) * SIZE)
            fresh[nodes] = history.pushed[nodes]
        dist.all_reduce(fresh, group=ctx.group("dp"))
        self.next_epoch = fresh


class LiveHistory:
    def __init__(self, table):
        self.pushed = table.clone()

    def pull(self):
        return self.pushed.clone()

    def push(self, cluster, h):
        self.pushed[cluster * SIZE : (cluster + 1) * SIZE] = h.detach()


class Buggy(Clean):
    def history(self, table):
        return LiveHistory(table)


EXPECT = dict(
    right=[
        r"histor|table|past|embedding|state|pushed",
        r"push|updat|overwrit|written|chang|mutat|carr(y|ied)|fresh|stale|new(er)?\b|mov(e|ed)|"
        r"within the step|kept",
        r"cluster|micro.?batch|accumul|earlier|previous|first|second|later|next|between",
    ],
    place=[
        r"LiveHistory|History",
        r"\bpush\b",
        r"\bpull\b",
        r"self\.pushed",
        r"history\.(push|pull)",
    ],
    wrong=[
        r"no_sync.{0,60}(wrong|last|off|missing)",
        r"(DDP|dp).{0,40}(averag\w+|divid\w+).{0,30}(wrong|instead|missing|twice)",
        r"labelled.{0,40}(local|own count|per rank)",
        r"ignore.?index|-100",
        r"(within|across).{0,30}(transposed|swapped)",
    ],
)
WHY = """In the objective every neighbour outside the cluster has its embedding of the last epoch
(batch["past"]). LiveHistory has one table: push writes the cluster's new embeddings into it,
and the later clusters of the same rank pull them. So the first micro-batch of each rank is right
and those after it read changed neighbours (across @ table); counts, DDP and no_sync are right.
Fix: push into a second table that comes into force after the step (History)."""
