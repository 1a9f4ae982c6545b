"""A pipeline of three stages (pp 3) written by hand over a slow link: of every token's activation only the three largest entries of eight (by magnitude) are sent, as values and indices; the others are zero for the next stage. That is part
of the model. Three micro-batches of unlike size, all forwards, then all backwards.

The bug: the gradient that goes back over the link is compressed by the same function, so it sends its own three largest entries, instead of those at the indices that were sent forward. After the top-k compression of activations and
gradients with one routine that "Does Compressing Activations Help Model Parallel Training?" (Bian et al., MLSys 2024) studies.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, TOKENS, FEATURES, WIDTH, KEPT, CLASSES = 7, 3, 5, 8, 3, 4
PARTS = [slice(0, 3), slice(3, 4), slice(4, 7)]


def largest(x):
    index = x.detach().abs().topk(KEPT, -1).indices
    return x.gather(-1, index), index


def spread(values, index):
    return torch.zeros(*values.shape[:-1], WIDTH, dtype=values.dtype).scatter(-1, index, values)


class Stage(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.enter, self.inner = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = F.silu(self.enter(x))
        return h + torch.tanh(self.inner(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([Stage(FEATURES), Stage(WIDTH), Stage(WIDTH)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for number, stage in enumerate(self.stages):
            x = stage(x)
            if number < 2:
                x = spread(*largest(x))
        return self.head(x)


class Clean:
    own_choice = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, TOKENS, FEATURES, generator=g),
            "label": torch.randint(CLASSES, (ROWS, TOKENS), generator=g),
        }

    def loss_sum(self, model, rows):
        scores = model(rows["x"]).flatten(0, 1)
        label = rows["label"].flatten()
        return F.cross_entropy(scores, label, reduction="sum"), len(label)

    def receive(self, rows, source, dtype):
        values = torch.empty(rows, TOKENS, KEPT, dtype=dtype)
        index = torch.empty(rows, TOKENS, KEPT, dtype=torch.long)
        dist.recv(values, source)
        dist.recv(index, source)
        return values, index

    def send(self, x, target):
        values, index = largest(x)
        dist.send(values.detach().contiguous(), target)
        dist.send(index, target)
        return index

    def step(self, model, batch, ctx):
        rank, last, stage = ctx.rank, ctx.world_size - 1, model.stages[ctx.rank]
        dtype = model.head.weight.dtype
        kept = []
        for part in PARTS:
            x, came, went = batch["x"][part], None, None
            if rank:
                values, came = self.receive(len(x), rank - 1, dtype)
                x = spread(values, came).requires_grad_()
            y = stage(x)
            if rank < last:
                went = self.send(y, rank + 1)
            kept.append((x, y, came, went))
        for part, (x, y, came, went) in zip(PARTS, kept):
            if rank == last:
                labels = batch["label"][part].flatten()
                loss = F.cross_entropy(model.head(y).flatten(0, 1), labels, reduction="sum")
                (loss / (ROWS * TOKENS)).backward()
            elif self.own_choice:
                y.backward(spread(*self.receive(len(y), rank + 1, dtype)))
            else:
                values = torch.empty(len(y), TOKENS, KEPT, dtype=dtype)
                dist.recv(values, rank + 1)
                y.backward(spread(values, went))
            if rank and self.own_choice:
                self.send(x.grad, rank - 1)
            elif rank:
                dist.send(x.grad.gather(-1, came), rank - 1)
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=ctx.group("pp"))


class Buggy(Clean):
    own_choice = True


EXPECT = dict(
    right=[
        r"(?i)gradient|backward|sent back|hand(ed|s) back|transport",
        r"(?i)stages?\b|boundar|link|pipeline|between|handed|sent|received|"
        r"rank 0.{0,12}1\b|compress|top.?k",
        r"(?i)wrong|other|not the|differ|mask|index|indices|entries|own|missing|sparse|"
        r"top.?k|compress",
    ],
    place=[
        r"(?i)stages?\.?\[?[01]|rank [01]|boundar|between (the )?stages?|link|stage 0|"
        r"stage 1|top.?k|compress"
    ],
    wrong=[
        r"(?i)forward (is|goes) wrong|goes wrong in the forward|(loss|labels?) (is|are|goes) wrong",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]\b",
        r"(?i)of another micro.?batch|micro.?batch(es)? .{0,20}(lost|dropped|overwritten|"
        r"never read|swapped)",
        r"(?i)never sent|not sent back|(is )?detached|no gradient (at all|arrives|comes)",
        r"(?i)(stages\.2|stage 2|head|rank 2).{0,25}(parameters?|gradients?|weights?) (is|"
        r"are) wrong",
    ],
)
WHY = (
    "All forwards are right on all stages, and so are loss and gradients of stages.2 and head (rank 2). Over both links, from rank 2 to rank 1 and from rank 1 to rank 0, the gradient goes back with its own three largest entries per "
    "token and their own indices. The receiver puts them at those indices: entries that were not sent forward get a gradient that should be zero, and kept entries whose gradient is not among the three largest get none. So the "
    "gradient of the outputs of stages.1 and stages.0 is wrong, in all three micro-batches and rows, and with it the gradients of stages.1 (rank 1) and stages.0 (rank 0, by both links). The order of the messages, the divisor 21 and "
    "the sum over pp are right. Fix: send x.grad gathered at the indices that came forward, and scatter it at the indices that went."
)
