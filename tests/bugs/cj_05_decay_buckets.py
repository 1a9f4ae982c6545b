"""A small ViT classifier (transformers, from a config), plain data parallelism over dp (3), two
micro-batches.

Gradients are reduced in flat buckets, one for each parameter group of the optimizer (with and
without decay).

Bug: the buckets are made by itertools.groupby over the parameters in model order. groupby groups
neighbours only, weights and biases take turns, and in the dict a later run of a key takes the
place of the earlier one: only the last run of each kind is reduced. After hand-written flat
buckets keyed by (dtype, decay).
"""

from collections import defaultdict
from itertools import groupby

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import ViTConfig, ViTForImageClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}


def decays(param):
    return param.ndim > 1


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return ViTForImageClassification(
            ViTConfig(
                hidden_size=12,
                num_hidden_layers=2,
                num_attention_heads=3,
                intermediate_size=19,
                image_size=9,
                patch_size=3,
                num_channels=2,
                num_labels=5,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(500 + self.seed)
        return {
            "image": torch.randn(10, 2, 9, 9, generator=g),
            "label": torch.randint(0, 5, (10,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(pixel_values=rows["image"]).logits
        return F.cross_entropy(logits, rows["label"], reduction="sum"), rows["label"].shape[0]

    def buckets(self, model):
        found = defaultdict(list)
        for p in model.parameters():
            found[decays(p)].append(p)
        return found

    def reduce(self, model, group):
        for params in self.buckets(model).values():
            flat = torch.cat([p.grad.reshape(-1) for p in params])
            dist.all_reduce(flat, group=group)
            for p, piece in zip(params, flat.split([p.numel() for p in params]), strict=True):
                p.grad.copy_(piece.view_as(p))

    def step(self, model, batch, ctx):
        n = batch["label"].shape[0]
        mine = torch.arange(n).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in mine.tensor_split(2):
            loss, _ = self.loss_sum(model, {k: v[part] for k, v in batch.items()})
            (loss / n).backward()
        self.reduce(model, ctx.group("dp"))


class Buggy(Clean):
    def buckets(self, model):
        return {kind: list(run) for kind, run in groupby(model.parameters(), key=decays)}


EXPECT = dict(
    right=[
        r"groupby|consecutive|neighbour|adjacent|run\b|overwrit|replac|takes the place|"
        r"last (bucket|run|group)|(missing|left out|dropped|absent|not) .*bucket|"
        r"only (the )?(last|a few|some)|subset",
        r"not (all.?|summed|reduced)|never (summed|reduced|all)|un(reduced|synced|synchroni)|"
        r"left (out|local)|local|own rank|miss|lost|drop|only",
    ],
    place=[r"bucket", r"groupby", r"\breduce\b", r"decays"],
    wrong=[
        r"micro-?batch\w* .*(lost|dropped|weight)",
        r"divided (twice|by)",
        r"flat.*split.*order",
        r"rows? .*(overlap|twice)",
    ],
)
WHY = """itertools.groupby groups only consecutive parameters of one kind. Weights and biases take
turns in model order, so each kind has many runs, and in the dict comprehension a later run
replaces the earlier. Only the last run of each kind is in a bucket (classifier.weight;
classifier.bias), all others keep the rank's own part of the gradient: these are wrong and differ
between ranks. A right cause says that most parameters fall out of the buckets and are not
all-reduced, for groupby needs sorted input. The fix is to collect in a defaultdict, or to sort
first."""
