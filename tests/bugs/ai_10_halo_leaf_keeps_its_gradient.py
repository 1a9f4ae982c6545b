"""Node classification on a graph cut into three parts, one per rank: six snapshots of node features (rows) in three micro-batches of two snapshots, a two-layer network on eleven nodes. For the second layer each rank receives the hidden
vectors of foreign neighbours (its halo) into one buffer, a leaf that requires a gradient, made once for all micro-batches. After the backward of the second layer the halo's gradient is sent to the owners, who add it to that of their
own nodes and go on through the first layer. Parameter gradients are summed over the ranks; the divisor is the number of labelled nodes of all snapshots.

The bug: the leaf's gradient is not cleared between micro-batches. Autograd adds to it, so the gradient sent to the owners contains those of the earlier micro-batches. As with pytorch/pytorch issue 185331 / PR 185355 (the persistent
receive buffer of a pipeline stage is used as its activation, and what belongs to one micro-batch accumulates on it).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"part": 3}}}}
SNAPSHOTS, MICRO, NODES, SIZE, WIDTH, CLASSES = 6, 2, 11, 4, 6, 5
CUTS = [(0, 4), (4, 8), (8, 11)]
EDGES = [
    (0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 9), (9, 10),
    (10, 0), (2, 6), (1, 9), (5, 10), (3, 8),
]  # fmt: skip


def adjacency(dtype):
    a = torch.zeros(NODES, NODES, dtype=dtype)
    for i, j in EDGES:
        a[i, j] = a[j, i] = 1.0
    return a


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.near = nn.Linear(SIZE, WIDTH), nn.Linear(SIZE, WIDTH, bias=False)
        self.own2, self.near2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def first(self, x, a):
        """x of all nodes (input data), a: the rows of the own nodes."""
        return torch.tanh(self.own(x[:, a[1]]) + self.near(a[0] @ x))

    def second(self, h, pool, a):
        return self.head(torch.tanh(self.own2(h) + self.near2(a @ pool)))


def entropy(scores, labels):
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum")


class Clean:
    clear = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        labels = torch.randint(CLASSES, (SNAPSHOTS, NODES), generator=g)
        hidden = torch.rand(SNAPSHOTS, NODES, generator=g) < 0.3
        return {
            "x": torch.randn(SNAPSHOTS, NODES, SIZE, generator=g),
            "labels": labels.masked_fill(hidden, -1),
        }

    def loss_sum(self, model, rows):
        a = adjacency(rows["x"].dtype)
        h = model.first(rows["x"], (a, torch.arange(NODES)))
        return entropy(model.second(h, h, a), rows["labels"]), int((rows["labels"] >= 0).sum())

    def step(self, model, batch, ctx):
        group, x = ctx.group("part"), batch["x"]
        a, count = adjacency(x.dtype), int((batch["labels"] >= 0).sum())
        low, high = CUTS[ctx.rank]
        mine = torch.arange(low, high)
        seen = a[mine].any(0)
        seen[mine] = False
        halo = seen.nonzero().flatten()
        inbox = x.new_zeros(MICRO, len(halo), WIDTH).requires_grad_()
        for part in torch.arange(SNAPSHOTS).split(MICRO):
            h = model.first(x[part], (a[mine], mine))
            everything = x.new_zeros(MICRO, NODES, WIDTH)
            everything[:, mine] = h.detach()
            dist.all_reduce(everything, group=group)
            if self.clear:
                inbox.grad = None
            with torch.no_grad():
                inbox.copy_(everything[:, halo])
            leaf = h.detach().requires_grad_()
            pool = torch.cat([leaf, inbox], 1)
            scores = model.second(leaf, pool, a[mine][:, torch.cat([mine, halo])])
            (entropy(scores, batch["labels"][part][:, mine]) / count).backward()
            back = torch.zeros_like(everything)
            back[:, halo] = inbox.grad
            dist.all_reduce(back, group=group)
            h.backward(leaf.grad + back[:, mine])
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    clear = False


EXPECT = dict(
    right=[
        r"(?i)micro.?batch|rows?\b|snapshot|second|later|from .{0,20}on\b|earlier|accumul\w*"
        r"|buffer|inbox|leaf",
        r"(?i)backward|gradient|hands? (back|on)|sent|returned|inbox|halo|transport|received",
        r"(?i)first\b|own\b|near\b|layer 1|hidden|halo|inbox|foreign|other ranks?|exchange"
        r"|boundary|neighbou?r",
    ],
    place=[r"(?i)halo|inbox|leaf|own\b|near\b|first|exchange|neighbou?r|hidden|boundary"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward|wrong input",
        r"(?i)(never|not) (been )?(all.?)?reduced|reduced (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)"
        r"|only the last micro.?batch (counts|is)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)(head|own2|near2)(\.(weight|bias))? .{0,12}(is|are) wrong",
        r"(?i)first micro.?batch .{0,20}(is )?wrong|wrong owner|wrong order",
    ],
)
WHY = (
    "Forward, loss and the second layer's gradients (own2, near2, head) are right on all ranks. The gradient of the hidden vectors that the owners get back for nodes in a foreign halo is right in micro-batch 0 (snapshots 0, "
    "1), too large by that of micro-batch 0 in micro-batch 1 (snapshots 2, 3), and by those of micro-batches 0 and 1 in micro-batch 2 (snapshots 4, 5): inbox.grad keeps adding. The stale gradient meets the activations of "
    "other snapshots, so the gradients of the first layer (own.weight, own.bias, near.weight) are wrong in direction, for nodes that are in somebody's halo, on all three ranks alike after the sum. The gradient of the own part "
    "(leaf is new in each micro-batch), the exchange of hidden vectors, the sum of halo gradients at the owner, the divisor and the sum over the ranks are right. Fix: inbox.grad = None (or a new leaf) per micro-batch."
)
