"""Classification with a macro-averaged loss: the loss of each class is the mean over its rows, and the loss is the mean over the classes that occur in the batch (classes without rows are left out). Thirteen rows over three data
parallel ranks, two micro-batches each; the numbers of rows of each class are summed over the ranks before the backward, gradients are summed by hand.

The bug: the number of classes that occur is counted by each rank in its own rows and then summed over the ranks, so that a class seen on two or three ranks is counted as often. After the "average='macro'" reductions of loss and metric
libraries under DDP (dist_reduce_fx='sum' for a count of present classes: torchmetrics discussions, per-class losses in mmsegmentation forks).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, FEATURES, WIDTH, CLASSES = 13, 6, 9, 7


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(FEATURES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.norm(F.silu(self.inner(x))))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"macro": (self.statistics, self.value)}

    def build(self):
        torch.manual_seed(self.seed)
        return Classifier()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        labels = torch.randint(
            CLASSES - 1, (ROWS,), generator=g
        )  # the last class is rare: absent here
        return {"x": torch.randn(ROWS, FEATURES, generator=g), "labels": labels}

    def class_sums(self, model, rows):
        losses = F.cross_entropy(model(rows["x"]), rows["labels"], reduction="none")
        return F.one_hot(rows["labels"], CLASSES).to(losses.dtype).T @ losses

    def statistics(self, model, rows):
        sums = self.class_sums(model, rows)
        return torch.stack([sums, torch.bincount(rows["labels"], minlength=CLASSES).to(sums.dtype)])

    def value(self, S, num_rows):
        sums, counts = S
        return (sums / counts.clamp(min=1)).sum() / (counts > 0).sum()

    def loss_sum(self, model, rows):
        return self.class_sums(model, rows).sum(), len(rows["labels"])

    def normalisers(self, labels, ctx):
        counts = torch.bincount(labels, minlength=CLASSES)
        dist.all_reduce(counts, group=ctx.group("dp"))
        return counts.clamp(min=1), (counts > 0).sum()

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: x.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, x in batch.items()}
        counts, present = self.normalisers(mine["labels"], ctx)
        for i in range(2):
            rows = {k: x.tensor_split(2)[i] for k, x in mine.items()}
            ((self.class_sums(model, rows) / counts).sum() / present).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def normalisers(self, labels, ctx):
        counts = torch.bincount(labels, minlength=CLASSES)
        present = (counts > 0).sum()
        dist.all_reduce(counts, group=ctx.group("dp"))
        dist.all_reduce(present, group=ctx.group("dp"))
        return counts.clamp(min=1), present


EXPECT = dict(
    right=[
        r"divisor|denominator|normalis|normaliz|count|number of (present )?classes|present|factor|scale",
        r"class(es)?|present|all.?reduce|sum(med)? over|(same|one|common|constant|uniform|single) (factor|ratio|scale)|every (parameter|element)|all parameters|times",
    ],
    place=[r"normalisers", r"present", r"all.?reduce", r"divi(ded|sor)|factor|times"],
    wrong=[
        r"mean of (the )?means|gradient accumulation (steps|factor)|forgot.{0,20}micro.?batch",
        r"parameters?.{0,30}(not reduced|reduced twice|never reduced)|missing (all.?)?reduc",
        r"averaged instead of summed|divided by (the )?world.?size",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
    ],
)
WHY = (
    "The batch has some six classes that occur; each rank counts the three to five different ones in its own four or five rows, and the sum of these numbers over the three ranks (about twelve) is taken as the number of classes that occur. "
    "The whole gradient of all parameters on all ranks is too small by the same factor (true number of classes over the sum), in both micro-batches. A right cause says that the divisor, the number of present classes, is wrong "
    "(a class is counted on several ranks); the per-class row counts and the reductions are right. Fix: count the classes after the row counts have been summed over the ranks."
)
