"""Data parallel training on three ranks of a residual net with twelve narrow layers; gradients are summed by hand, one flat message per layer in the order in which the backward makes them ready (the last layer first), after the last of
two micro-batches; the parameters outside of the layers come in one message at the end.

The bug: the parameters of a layer are found by the beginning of their names, name.startswith("layers.1"), without the dot behind the number. Layer 1 therefore also collects layers 10 and 11, which have been summed over the ranks
before. The well-known trap of prefixes in module names: accelerate's utils/modeling.py compares names with the prefix plus "." for this reason.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, INPUTS, WIDTH, LAYERS, CLASSES = 11, 5, 4, 12, 3
PARTS = [[(0, 3), (3, 4)], [(4, 6), (6, 7)], [(7, 10), (10, 11)]]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(INPUTS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.start(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def sum_together(parameters, group):
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat, group=group)
    parts = flat.split([p.numel() for p in parameters])
    for p, part in zip(parameters, parts):
        p.grad.copy_(part.view_as(p))


class Clean:
    behind = "."

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        scores = model(rows["x"])
        return F.cross_entropy(scores, rows["label"], reduction="sum"), len(scores)

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        for low, high in PARTS[ctx.rank]:
            loss, _ = self.loss_sum(model, {k: v[low:high] for k, v in batch.items()})
            (loss / ROWS).backward()
        named = list(model.named_parameters())
        for number in reversed(range(LAYERS)):
            prefix = f"layers.{number}{self.behind}"
            sum_together([p for name, p in named if name.startswith(prefix)], group)
        sum_together([p for name, p in named if not name.startswith("layers.")], group)


class Buggy(Clean):
    behind = ""


EXPECT = dict(
    right=[
        r"(?i)layers?[.\[ ]*\(?1[01]\b|layers? 10 and 11|layers? 10, 11",
        r"(?i)twice|again|second time|two times|double|factor|times|\b3\b|three|too (large"
        r"|big)|world size",
        r"(?i)reduc|sum|add|count|scal|factor|multipl|times",
    ],
    place=[r"(?i)layers?[.\[ ]*\(?1[01]\b|layers? 10 and 11"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward|own backward (is|goes) wrong",
        r"(?i)never (been )?(all.?)?reduced|not (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(?i)layers\.[02-9]\.\S+ (is|are) wrong|(start|head)\.(weight|bias) (is|are) wrong",
        r"(?i)mean of means|divi(ded|des) by (its|their) own|micro.?batch(es)? .{0,20}(lost"
        r"|dropped|overwritten|twice)",
        r"(?i)only (on )?rank \d|rank \d alone|(other|wrong) (rows|labels)",
        r"(?i)all (parameters|layers) (are|come|count)|detach|tied",
    ],
)
WHY = (
    "Forward, backward and accumulation are right on all ranks, rows and micro-batches. The messages go out for layers 11, 10, 9 .. 0; the message of layer 1 takes all parameters whose names begin with 'layers.1': layers.1, "
    "layers.10 and layers.11. The latter two have been summed over the three ranks already, and the second sum of three equal gradients makes them 3 times the right gradient: layers.10 and layers.11, norm and linear, weight and "
    "bias, on all ranks alike. Everything else (start, layers.0 to layers.9, layers.1 included, head) is right. Divisor 11 is right. Fix: startswith('layers.1.')."
)
