"""A small detector (convolutions, a class head, a box head) under hybrid sharding: FSDP2 on a
mesh of dp_replicate (2) x dp_shard (2), two micro-batches.

The loss is the sum of a class term and a smooth L1 distance of the box, for each image.

Bug: the training step computes the box term with huber_loss(delta=BETA). Both have the same
corner, but Huber is BETA times smooth L1: the box term weighs BETA of what it should. After
detection code that moved from smooth_l1_loss (beta) to huber_loss (delta) in its trainer alone.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

TOPOLOGY = {"pools": {"train": {"axes": {"dp_replicate": 2, "dp_shard": 2}}}}
BETA = 0.3


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 5, 3), nn.SiLU(), nn.Conv2d(5, 7, 3, stride=2), nn.SiLU()
        )
        self.classes = nn.Linear(7, 3)
        self.box = nn.Linear(7, 4)

    def forward(self, image):
        h = self.body(image).mean((2, 3))
        return self.classes(h), self.box(h)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Detector()

    def batch(self):
        g = torch.Generator().manual_seed(800 + self.seed)
        return {
            "image": torch.randn(11, 2, 9, 7, generator=g),
            "label": torch.randint(0, 3, (11,), generator=g),
            "box": torch.randn(11, 4, generator=g),
        }

    def loss_sum(self, model, rows):
        logits, box = model(rows["image"])
        named = F.cross_entropy(logits, rows["label"], reduction="sum")
        placed = F.smooth_l1_loss(box, rows["box"], beta=BETA, reduction="sum")
        return named + placed, rows["label"].shape[0]

    def distribute(self, model, ctx):
        mesh = ctx.mesh["dp_replicate", "dp_shard"]
        fully_shard(model.body, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def train_loss(self, model, rows):
        return self.loss_sum(model, rows)[0]

    def step(self, model, batch, ctx):
        n, world = batch["label"].shape[0], ctx.axes["dp_replicate"] * ctx.axes["dp_shard"]
        place = ctx.coords["dp_replicate"] * ctx.axes["dp_shard"] + ctx.coords["dp_shard"]
        parts = torch.arange(n).tensor_split(world)[place].tensor_split(2)
        for i, part in enumerate(parts):
            model.set_requires_gradient_sync(i == len(parts) - 1)
            loss = self.train_loss(model, {k: v[part] for k, v in batch.items()})
            (loss * world / n).backward()


class Buggy(Clean):
    def train_loss(self, model, rows):
        logits, box = model(rows["image"])
        named = F.cross_entropy(logits, rows["label"], reduction="none")
        placed = F.huber_loss(box, rows["box"], delta=BETA, reduction="none").sum(-1)
        return (named + placed).sum()


EXPECT = dict(
    right=[
        r"huber|smooth.?l1|\bbeta\b|\bdelta\b|0\.3\b|scaled|factor|weigh(s|ed|ing|ted)\b|"
        r"too (small|large)",
        r"box|regression|huber|smooth.?l1",
    ],
    place=[r"train_loss", r"huber_loss", r"\bbox\b", r"smooth_l1"],
    wrong=[
        r"replica\w* .*(not|never) (reduced|summed)",
        r"class (term|head|loss) .*(wrong|missing)",
        r"divided by (the )?world",
        r"micro-?batch\w* .*(not sync|averag)",
    ],
)
WHY = """huber_loss(delta) equals delta * smooth_l1_loss(beta=delta). The training step's box term
is therefore BETA = 0.3 times the box term of the objective. The gradients of box.weight and
box.bias are 0.3 times the right ones, those of classes are right, and the body's are a wrong
mixture of the two terms. A right cause says that the box term is scaled by BETA (Huber in place
of smooth L1). The fix is smooth_l1_loss(beta=BETA), or to divide by BETA."""
