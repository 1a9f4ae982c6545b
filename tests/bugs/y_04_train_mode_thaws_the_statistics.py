"""Fine-tuning transformers' ResNet with frozen batch-norm statistics (the usual norm_eval of detection and segmentation recipes: running mean and variance of pretraining, affine weights are trained), DDP of four, rows 3, 3, 3 and 2, two
micro-batches each.

The bug: the statistics are frozen once, before the first step, by putting the batch-norm modules into eval(); every training_step then begins with `model.train()`, as transformers' Trainer.training_step does, and puts them back: each micro-batch is
normalised by its own mean and variance. pgniewko/gt-pyg issue #112; jfzhang95/pytorch-deeplab-xception issue #140; poppinace/indexnet_matting issue #35.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import ResNetConfig, ResNetForImageClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
ROWS, SIZE, CLASSES, MICRO = 11, 20, 5, 2


def norms(model):
    return [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]


def freeze_statistics(model):
    for norm in norms(model):
        norm.eval()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        model = ResNetForImageClassification(
            ResNetConfig(
                num_channels=3,
                embedding_size=6,
                hidden_sizes=[6, 8],
                depths=[1, 1],
                layer_type="basic",
                num_labels=CLASSES,
            )
        )
        for norm in norms(model):
            nn.init.normal_(norm.running_mean, std=0.3)
            nn.init.uniform_(norm.running_var, 0.4, 1.6)
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.3)
        freeze_statistics(model)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "pixels": torch.randn(ROWS, 3, SIZE, SIZE, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        freeze_statistics(model)
        return self.classify(model, rows), len(rows["label"])

    def classify(self, model, rows):
        return F.cross_entropy(
            model(pixel_values=rows["pixels"]).logits, rows["label"], reduction="sum"
        )

    def distribute(self, model, ctx):
        freeze_statistics(model)
        return DistributedDataParallel(model)

    def training_step(self, model, rows, weight):
        model.train()
        freeze_statistics(model)
        (self.classify(model, rows) * weight).backward()

    def step(self, model, batch, ctx):
        mine = {
            k: v.tensor_split(ctx.world_size)[ctx.rank].tensor_split(MICRO)
            for k, v in batch.items()
        }
        for m in range(MICRO):
            model.require_backward_grad_sync = m == MICRO - 1
            self.training_step(model, {k: v[m] for k, v in mine.items()}, ctx.world_size / ROWS)


class Buggy(Clean):
    def training_step(self, model, rows, weight):
        model.train()
        (self.classify(model, rows) * weight).backward()


EXPECT = dict(
    right=[r"norm", r"mode|train|eval|statistic|running|mean|variance|batch|couple|forward"],
    place=[r"norm"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"(reduced|summed|added) (twice|again)",
        r"micro.?batch\S* .{0,20}(lost|dropped|missing|overwritten)",
        r"each rank .{0,20}own (count|number|denominator)",
        r"forward is (right|the same|equal)",
        r"rows? .{0,20}(never read|read twice)",
        r"should be (a )?(sync|synchronis|synchroniz)",
    ],
)
WHY = (
    "The batch-norm modules are in training mode in the step, where the reference (and the recipe) normalises by the stored running mean and variance. So in the forward every micro-batch of every rank, 2 rows or 1, is normalised by "
    "its own statistics, and the backward goes through these statistics; the first wrong module is the first batch norm (resnet.embedder.embedder.normalization), all later ones as well, on all ranks and in all micro-batches. All gradients are wrong, also the "
    "classifier's, whose input is wrong; besides, the running statistics move and differ from rank to rank. Right are the rows, the division by 11, the accumulation and the average of DDP. It is no matter of synchronising statistics over ranks: they should not be taken from the batch at all. The fix is "
    "to freeze again after each model.train() (or to override train())."
)
