"""Link prediction on enclosing subgraphs (SEAL): a row is a small undirected graph around two nodes 0 and 1, with features, a number of nodes and the question whether the two are linked. Two graph convolutions with symmetric normalisation
and self loops, a score from both ends, binary cross-entropy. Four ranks with two micro-batches each, gradients in one flat bucket, all-reduced. Mean over the asked links of all ranks.

The bug: before the convolutions the asked link itself is taken out of the graph, but only from node 0 to node 1; the edge back stays. Where the link exists, node 0 still hears node 1 through the very link that is asked for. As the
question of exclude="self" against exclude="reverse_id" for edge prediction in dgl, and of taking out the target link in muhanzhang/SEAL.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
NODES, SEEN, WIDTH = 6, 4, 6
SIZES = [6, 4, 5, 6, 3, 5, 6, 4, 5, 6, 4]
LINKED = [1, 0, 0, 1, 0, 0, 0, 1, 1, 0, 1]
PARTS = [[(0, 1), (1, 3)], [(3, 4), (4, 5)], [(5, 7), (7, 8)], [(8, 10), (10, 11)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(SEEN, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.score = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, edges, seen, size):
        """edges[row, a, b]: node a hears node b."""
        there = torch.arange(NODES)[None] < size[:, None]
        hears = edges.to(seen.dtype) + torch.diag_embed(there.to(seen.dtype))
        degree = hears.sum(-1).clamp(min=1) ** -0.5
        hears = degree[:, :, None] * hears * degree[:, None, :]
        x = torch.tanh(hears @ self.first(seen))
        x = torch.tanh(hears @ self.second(x))
        return self.score(x[:, 0] * x[:, 1])[:, 0]


def without_the_asked(edges, both):
    edges = edges.clone()
    edges[:, 1, 0] = False
    if both:
        edges[:, 0, 1] = False
    return edges


def link_loss(model, rows, both):
    score = model(without_the_asked(rows["edges"], both), rows["seen"], rows["size"])
    linked = rows["linked"].to(score.dtype)
    return F.binary_cross_entropy_with_logits(score, linked, reduction="sum")


class Clean:
    both = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(SIZES)
        size, linked = torch.tensor(SIZES), torch.tensor(LINKED)
        there = torch.arange(NODES)[None] < size[:, None]
        upper = (torch.rand(rows, NODES, NODES, generator=g) < 0.5).triu(1)
        upper[:, 0, 1] = linked.bool()
        upper = upper & there[:, :, None] & there[:, None, :]
        return {
            "edges": upper | upper.transpose(1, 2),
            "seen": torch.randn(rows, NODES, SEEN, generator=g) * there[..., None],
            "size": size,
            "linked": linked,
        }

    def loss_sum(self, model, rows):
        return link_loss(model, rows, True), len(rows["linked"])

    def step(self, model, batch, ctx):
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            (link_loss(model, rows, self.both) / len(batch["linked"])).backward()
        bucket = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(bucket, group=ctx.group("dp"))
        start = 0
        for p in model.parameters():
            p.grad.copy_(bucket[start : start + p.numel()].view_as(p))
            start += p.numel()


class Buggy(Clean):
    both = False


EXPECT = dict(
    right=[
        r"(?i)forward|input|output|values?|edges?|graph|data",
        r"(?i)rows?|micro.?batch|links?|graphs?|linked",
        r"(?i)edges|input|graph|first|second|score|data|adjacen",
    ],
    place=[r"(?i)edges|input|first|second|score|graph|adjacen"],
    wrong=[
        r"(?i)(not|never) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|bucket .{0,30}wrong",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward is right|wrong only in the backward|own backward",
        r"(?i)labels? .{0,20}(is|are) (wrong|of)|rows? of (another|other)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never)",
        r"(?i)only (on )?rank [0-3]\b|rank [0-3] alone|all rows (are )?wrong|every row (is )?wrong",
    ],
)
WHY = (
    "In the rows whose asked link exists the edge from node 1 to node 0 (edges[row, 0, 1]: node 0 hears node 1) stays in the input graph: rows 0 (rank 0, micro-batch 0), 3 (rank 1, micro-batch 0), 7 (rank 2, micro-batch 1), 8 (rank 3, "
    "micro-batch 0) and 10 (rank 3, micro-batch 1). Rows without the link (1, 2, 4, 5, 6, 9) have nothing to take out and are right. The output of the first linear layer is right (it works on the features); from the multiplication with "
    "the normalised adjacency on, node 0's value and its degree, and in the second layer its neighbours' too, are wrong: the input of `second` and of `score` in these rows. All gradients are wrong, equally on all ranks. Features, "
    "answers, divisor 11, accumulation and the bucket's all-reduce are right. Fix: take out both directions."
)
