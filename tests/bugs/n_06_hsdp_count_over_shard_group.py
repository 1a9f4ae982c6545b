"""A ViT in HSDP (fully_shard on a replicate x shard mesh), some images without a label. After torchtitan and pytorch questions on loss
normalisation with HSDP: the count of labelled samples is summed in the shard group, and the replicas are averaged.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

TOPOLOGY = {"pools": {"train": {"axes": {"replicate": 2, "shard": 2}}}}
ROWS, CLASSES = 9, 5


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return ViTForImageClassification(
            ViTConfig(
                hidden_size=18,
                num_hidden_layers=2,
                num_attention_heads=3,
                intermediate_size=31,
                image_size=9,
                patch_size=3,
                num_channels=2,
                num_labels=CLASSES,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                initializer_range=0.2,
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        labels = torch.randint(CLASSES, (ROWS,), generator=g)
        labels[torch.tensor([6, 8])] = -100
        return {"pixel_values": torch.randn(ROWS, 2, 9, 9, generator=g), "labels": labels}

    def loss_sum(self, model, rows):
        logits = model(pixel_values=rows["pixel_values"]).logits
        labels = rows["labels"]
        return F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()

    def distribute(self, model, ctx):
        mesh = ctx.mesh["replicate", "shard"]
        for layer in model.vit.layers if hasattr(model.vit, "layers") else model.vit.encoder.layer:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def scale(self, count, ctx):
        dist.all_reduce(count)
        # HSDP averages over all ranks
        return ctx.world_size / count

    def step(self, model, batch, ctx):
        place = ctx.coords["replicate"] * ctx.axes["shard"] + ctx.coords["shard"]
        mine = {k: v.tensor_split(ctx.world_size)[place] for k, v in batch.items()}
        loss, count = self.loss_sum(model, mine)
        (loss * self.scale(count, ctx)).backward()


class Buggy(Clean):
    def scale(self, count, ctx):
        dist.all_reduce(count, group=ctx.group("shard"))
        return ctx.axes["shard"] / count


EXPECT = dict(
    right=[
        r"mean of (the )?means|means.{0,80}averag|averag.{0,80}means|count|denominator|divisor|number of|normali[sz]|weigh|labelled",
        r"replica|replicate|group|shard",
    ],
    place=[
        r"replica|replicate|shard|group",
        r"(every|all|each) (param|gradient|rank|weight|tensor)",
        r"count|divi|denominator",
    ],
    wrong=[
        r"(not|never) (been )?(all.?)?(reduced|summed)",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"rows? (is|are|was|were) (missing|dropped|lost|counted)",
        r"every rank.{0,40}(own|local) (count|rows|mean)",
        r"micro.?batch",
    ],
)
WHY = (
    "The number of labelled images is summed over the shard group only, so each replica group takes the mean over its own labelled images "
    "(5 against 2) and the two means are averaged with equal weight: a mean of means over 'replicate'. All parameters, all ranks; the ranks "
    "agree with each other."
)
