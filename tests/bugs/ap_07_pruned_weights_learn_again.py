"""FSDP2 (fully_shard per layer and for the root) on two ranks, two micro-batches each, of a pruned classifier: 2 of 4 weights of each group of the two inner layers are masked, and the masked ones are zero. Fine-tuning keeps the mask:
weight * mask in the graph. Loss sum times ranks / all rows, since FSDP averages.

The bug: the sharded model uses the bare weights, "they are zero anyway"; outputs and input gradients are the same, but the gradient of the weights is no longer masked, and pruned weights come to life. As in pytorch/pytorch issue 103958
(pruned model under FSDP: the hooks that mask weight and gradient are lost) and he-y/filter-pruning-geometric-median issue 47.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
FEATURES, WIDTH, CLASSES = 5, 8, 3
PARTS = [[(0, 2), (2, 5)], [(5, 6), (6, 9)]]
ROWS = 9


class Pruned(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        scores = self.weight.detach().abs().unflatten(1, (-1, 4))
        mask = scores.argsort(-1).argsort(-1) >= 2
        self.register_buffer("mask", mask.flatten(1).to(self.weight.dtype))
        self.weight.data.mul_(self.mask)
        self.bare = False

    def forward(self, x):
        return F.linear(x, self.weight if self.bare else self.weight * self.mask, self.bias)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.inner = nn.ModuleList(Pruned(WIDTH, WIDTH) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.first(x)
        for layer in self.inner:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


class Clean:
    bare = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FEATURES, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["label"], reduction="sum"), len(rows["label"])

    def distribute(self, model, ctx):
        for layer in model.inner:
            layer.bare = self.bare
            fully_shard(layer, mesh=ctx.mesh)
        fully_shard(model, mesh=ctx.mesh)
        return model

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            model.set_requires_gradient_sync(turn == len(parts) - 1)
            loss, _ = self.loss_sum(model, {k: v[low:high] for k, v in batch.items()})
            (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    bare = True


EXPECT = dict(
    right=[
        r"(?i)inner",
        r"(?i)mask|prun|zero|extra|additional|should (have|get|be) (no|none|nothing)|no gradient in the reference|elements|entries|part of the (weight|elements|entries)",
        r"(?i)weight",
    ],
    place=[r"(?i)inner(\.[01])?(\.weight)?"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?2\b",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(head|norm|first)\.(weight|bias) (is|are) wrong|inner\.[01]\.bias (is|are) wrong",
        r"(?i)only (on )?rank [01]\b|rank [01] alone|only the (first|last) micro.?batch",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
        r"(?i)gradient (of|handed to) (the )?(input|inner.?s input).{0,20}wrong",
    ],
)
WHY = (
    "inner.0.weight and inner.1.weight: half of the elements are masked and zero. In the sharded model the mask is left out of the graph, so exactly these elements get a gradient (dW of the dense layer), where the right one "
    "is exactly zero; the other half of the elements is right. "
    "On both ranks (both shards), from all rows and micro-batches. Forward, input gradients, biases of inner, first, norm, head, FSDP's average, the sync of the last micro-batch and the divisor 9 are right. Fix: weight * "
    "mask in the forward (or mask the gradient shard with the mask's shard)."
)
