"""Image classification with transformers' Swin under DDP (three ranks, two micro-batches each) and CutMix (Yun et al. 2019): a box of another image is pasted into each image, and the loss is share * CE(label) + (1 - share) * CE(label of the other), where share is the part of the image that is left. The box has a drawn centre and
a drawn area, and is clipped at the border of the image.

The bug: share is the drawn number and not computed again from the clipped box. Origin: the same omission was made and mended in many implementations of CutMix (the paper's own code adjusts "lambda to exactly match pixel ratio"; issues at several training repositories ask for it).
"""

import contextlib

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import SwinConfig, SwinForImageClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, SIDE, CLASSES, MICRO = 13, 16, 6, 2


def cut(rows):
    """Pastes the boxes; the images, and the edges of the boxes as they were pasted."""
    half = (SIDE * (1 - rows["drawn"]).sqrt() / 2).round().long()
    low = (rows["centre"] - half[:, None]).clamp(0, SIDE)
    high = (rows["centre"] + half[:, None]).clamp(0, SIDE)
    place = torch.arange(SIDE)
    inside = (place >= low[..., None]) & (place < high[..., None])  # rows, 2, SIDE
    box = inside[:, 0, :, None] & inside[:, 1, None, :]
    return torch.where(box[:, None], rows["other"], rows["image"]), low, high


def share_left(rows, low, high):
    return 1 - (high - low).prod(1) / SIDE**2


def share_drawn(rows, low, high):
    return rows["drawn"]


class Clean:
    share = staticmethod(share_left)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return SwinForImageClassification(
            SwinConfig(
                image_size=SIDE,
                patch_size=2,
                embed_dim=8,
                depths=[1, 2],
                num_heads=[1, 2],
                window_size=4,
                mlp_ratio=2.0,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                drop_path_rate=0.0,
                initializer_range=0.2,
                num_labels=CLASSES,
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        image = torch.randn(ROWS, 3, SIDE, SIDE, generator=g)
        label = torch.randint(CLASSES, (ROWS,), generator=g)
        partner = torch.randperm(ROWS, generator=g)
        # areas of 4 to 60 percent; shares in steps of 1/64 so that every dtype holds them
        drawn = torch.randint(26, 62, (ROWS,), generator=g) / 64
        return {
            "image": image,
            "other": image[partner],
            "label": label,
            "other_label": label[partner],
            "centre": torch.randint(SIDE, (ROWS, 2), generator=g),
            "drawn": drawn,
        }

    @staticmethod
    def mixed_loss(model, rows, share_of):
        images, low, high = cut(rows)
        logits = model(pixel_values=images).logits
        share = share_of(rows, low, high).to(logits.dtype)
        one = F.cross_entropy(logits, rows["label"], reduction="none")
        two = F.cross_entropy(logits, rows["other_label"], reduction="none")
        return (share * one + (1 - share) * two).sum()

    def loss_sum(self, model, rows):
        return self.mixed_loss(model, rows, share_left), len(rows["label"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for m in range(MICRO):
            rows = {k: v.tensor_split(MICRO)[m] for k, v in mine.items()}
            with contextlib.nullcontext() if m == MICRO - 1 else model.no_sync():
                loss = self.mixed_loss(model, rows, self.share)
                (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    share = staticmethod(share_drawn)


EXPECT = dict(
    right=[
        r"(?i)loss|targets?|labels?|weigh|share|mix",
        r"(?i)weigh|share|mix|target|label|rows?\b|coefficient|loss itself|differen|other loss",
    ],
    place=[r"(?i)loss|targets?|labels?|logits|share"],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|(reduced|summed) (twice|again)",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward|first wrong .{0,60}(swin|encoder|embeddings|layers)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)rows? .{0,20}(never read|read twice)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their|the) (own|number)",
        r"(?i)backward of \S+ is wrong|wrong adjoint",
    ],
)
WHY = (
    "The two labels of a row are weighted by the drawn share instead of by the share of the image that the clipped (and rounded) box leaves. For rows whose box reaches over the border the second label gets too much weight (its box is smaller than drawn); rows whose box lies inside are off by the rounding of the box to pixels only (with seed 0 the right share less the drawn one lies between -0.05 and 0.23; two rows are above 0.18). The two weights still sum to one, "
    "so it is no matter of a divisor: the gradient at the logits of such a row is off by (share - drawn) * (onehot of the other label - onehot of the label), up to sign. On all ranks and in both micro-batches, according to the rows there; all parameters are wrong in direction, equal on all ranks. "
    "Images, boxes, logits (the forward), the labels themselves, the divisor (rows), the average over ranks and the micro-batches are right. Fix: share = 1 - area of the clipped box / area of the image."
)
