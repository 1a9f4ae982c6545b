"""Graph attention (GAT, one head per layer) on small directed graphs, three data-parallel ranks with two micro-batches each; the graphs of a micro-batch are joined by node offsets, the attention weights are normalised over the edges that
arrive at a node by an autograd Function of its own (edge softmax with saved output). Every node is classified; the divisor is the number of nodes of the whole batch; gradients are summed over dp by hand.

The bug: the backward of the edge softmax sums over the edges that leave the same node (edge_index[0], the sender) where the forward normalised over those that arrive (edge_index[1]). As the mix-up of the two rows in pyg-
team/pytorch_geometric issue 224 (softmax wrong index in the GATConv), here in the backward, compare DGL's edge_softmax with norm_by.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
NODES, EDGES, FEATURES, WIDTH, CLASSES = 5, 11, 3, 6, 4
PARTS = [[(0, 2), (2, 5)], [(5, 6), (6, 8)], [(8, 11), (11, 12)]]
SIZES = [5, 4, 5, 3, 5, 4, 5, 5, 3, 4, 5, 4]


class EdgeSoftmax(torch.autograd.Function):
    """Softmax of edge scores over the edges with the same `to`."""

    @staticmethod
    def forward(ctx, scores, edges, nodes, by_sender):
        to = edges[1]
        top = scores.new_full((nodes,), float("-inf")).scatter_reduce(0, to, scores, "amax")
        weights = torch.exp(scores - top[to])
        total = scores.new_zeros(nodes).index_add(0, to, weights)
        weights = weights / total[to]
        ctx.save_for_backward(weights, edges)
        ctx.nodes, ctx.by_sender = nodes, by_sender
        return weights

    @staticmethod
    def backward(ctx, grad):
        weights, edges = ctx.saved_tensors
        group = edges[0] if ctx.by_sender else edges[1]
        inner = weights * grad
        total = grad.new_zeros(ctx.nodes).index_add(0, group, inner)
        return inner - weights * total[group], None, None, None


class GraphAttention(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.value, self.root = nn.Linear(inputs, WIDTH, bias=False), nn.Linear(inputs, WIDTH)
        self.sender = nn.Parameter(torch.randn(WIDTH) * 0.7)
        self.receiver = nn.Parameter(torch.randn(WIDTH) * 0.7)
        self.by_sender = False

    def forward(self, x, edges):
        v = self.value(x)
        scores = torch.tanh(v @ self.sender)[edges[0]] + (v @ self.receiver)[edges[1]]
        scores = F.leaky_relu(scores, 0.2)
        weights = EdgeSoftmax.apply(scores, edges, len(x), self.by_sender)
        messages = weights[:, None] * v[edges[0]]
        return self.root(x) + torch.zeros_like(v).index_add(0, edges[1], messages)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GraphAttention(FEATURES), GraphAttention(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, edges):
        return self.head(F.elu(self.second(F.elu(self.first(x, edges)), edges)))


def graph_loss(model, rows):
    """Sum of the cross entropy over the nodes of these graphs, and their number."""
    sizes = rows["size"]
    offsets = torch.cumsum(sizes, 0) - sizes
    there = torch.arange(NODES)[None] < sizes[:, None]
    used = rows["edge"].amax(2) < sizes[:, None]
    edges = (rows["edge"] + offsets[:, None, None])[used].T.contiguous()
    scores = model(rows["x"][there], edges)
    return F.cross_entropy(scores, rows["label"][there], reduction="sum"), int(sizes.sum())


class Clean:
    by_sender = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(SIZES)
        return {
            "x": torch.randn(rows, NODES, FEATURES, generator=g),
            "size": torch.tensor(SIZES),
            "edge": torch.randint(NODES, (rows, EDGES, 2), generator=g),
            "label": torch.randint(CLASSES, (rows, NODES), generator=g),
        }

    def loss_sum(self, model, rows):
        return graph_loss(model, rows)

    def distribute(self, model, ctx):
        model.first.by_sender = model.second.by_sender = self.by_sender
        return model

    def step(self, model, batch, ctx):
        nodes = int(batch["size"].sum())
        for low, high in PARTS[ctx.rank]:
            loss, _ = graph_loss(model, {k: v[low:high] for k, v in batch.items()})
            (loss / nodes).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    by_sender = True


EXPECT = dict(
    right=[
        r"(?i)backward|adjoint|gradient (of|that)|hands? (back|on)",
        r"(?i)EdgeSoftmax|edge|soft.?max|attention|first|second",
    ],
    place=[r"(?i)EdgeSoftmax|edge.?softmax|\b(first|second)\b|attention"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank \d|rank \d alone",
        r"(?i)head\.(weight|bias) (is|are) wrong|wrong labels?|labels? .{0,15}shifted",
    ],
)
WHY = (
    "The forward is right on all ranks, rows and micro-batches. The backward of EdgeSoftmax (both layers, all three ranks, every micro-batch) takes sum(weights * grad) over the edges with the same sender instead of the same receiver, so "
    "the gradient of the scores is wrong in direction. Wrong: first.sender, first.receiver, second.sender, second.receiver, and through the scores first.value and second.value, and first.root (its gradient comes back through the scores "
    "of the second layer as well). Right: head, second.root. Divisor (all nodes), node offsets, labels and the all-reduce are right. Fix: group by edges[1] in the backward, as in the forward."
)
