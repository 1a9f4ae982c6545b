"""Multi-scale training of a tiny SegFormer (transformers) under DDP on three ranks, two micro-batches of uneven size each (no_sync for the first). The micro-batches of rows 2 and 5-6 are shown at two thirds of the size: photo and
label map are resized from 12 to 8 pixels. The divisor is the number of labelled pixels of all ranks after the resizing.

The bug: the label map goes through the same bilinear resize as the photo and is rounded afterwards, so at the borders of the objects classes arise that lie between the two (between sky 0 and person 4 a strip of road 2). After
divamgupta/image-segmentation-keras issue 11, shekkizh/FCN.tensorflow issue 4 and Depanshu-Sani/SICKLE issue 6.
"""

import contextlib

import torch
from torch.nn import GroupNorm
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import SegformerConfig, SegformerForSemanticSegmentation

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
SIDE, SMALL, CLASSES = 12, 8, 5
PARTS = [[(0, 2), (2, 3)], [(3, 5), (5, 7)], [(7, 8), (8, 10)]]
SHRUNK = [0, 0, 1, 0, 0, 1, 1, 0, 0, 0]


def shown(image, label, like_the_photo):
    """The rows at two thirds of their size."""
    image = F.interpolate(image, size=(SMALL, SMALL), mode="bilinear", align_corners=False)
    label = label[:, None].to(image.dtype)
    if like_the_photo:
        label = F.interpolate(label, size=(SMALL, SMALL), mode="bilinear", align_corners=False)
    else:
        label = F.interpolate(label, size=(SMALL, SMALL), mode="nearest")
    return image, label[:, 0].round().long()


def segmentation_loss(model, rows, like_the_photo):
    total = 0
    for shrunk in (False, True):
        take = rows["shrunk"].bool() == shrunk
        if not take.any():
            continue
        image, label = rows["image"][take], rows["label"][take]
        if shrunk:
            image, label = shown(image, label, like_the_photo)
        logits = model(pixel_values=image).logits
        logits = F.interpolate(logits, size=label.shape[1:], mode="bilinear", align_corners=False)
        total = total + F.cross_entropy(logits, label, reduction="sum")
    return total


def pixels(rows):
    return int((rows["shrunk"] * SMALL**2 + (1 - rows["shrunk"]) * SIDE**2).sum())


class Clean:
    like_the_photo = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = SegformerConfig(
            num_channels=2,
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[8, 8],
            patch_sizes=[3, 3],
            strides=[2, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
            drop_path_rate=0.0,
            initializer_range=0.3,
            num_labels=CLASSES,
        )
        model = SegformerForSemanticSegmentation(config)
        model.decode_head.batch_norm = GroupNorm(2, 8)  # small batches
        return model.train()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(SHRUNK)
        label = torch.zeros(rows, SIDE, SIDE, dtype=torch.long)
        for row in range(rows):
            for _ in range(3):
                y, x = torch.randint(0, 8, (2,), generator=g).tolist()
                h, w = torch.randint(3, 7, (2,), generator=g).tolist()
                label[row, y : y + h, x : x + w] = torch.randint(CLASSES, (1,), generator=g)
        return {
            "image": torch.randn(rows, 2, SIDE, SIDE, generator=g),
            "label": label,
            "shrunk": torch.tensor(SHRUNK),
        }

    def loss_sum(self, model, rows):
        return segmentation_loss(model, rows, False), pixels(rows)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        count = pixels(batch)
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = segmentation_loss(model, rows, self.like_the_photo)
                (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    like_the_photo = True


EXPECT = dict(
    right=[
        r"(?i)label|target|ground.?truth|annotation|(at|in|of) the loss|the loss (itself|function|reads|gets|is)|loss.{0,40}(other|different|wrong)",
        r"(?i)wrong|other|different|differ|not the (same|right)|deviat|foreign|between",
        r"(?i)rows? |micro.?batch|resiz|shrunk|small|scale|bilinear|interpolat",
    ],
    place=[r"(?i)label|target|loss|rows? [0-9]|micro.?batch"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted twice|no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)(logits|encoder|decode_head|segformer|classifier)[^.]{0,40}forward is wrong|forward goes wrong (at|in|from) (segformer|decode_head)",
        r"(?i)goes wrong in the backward of|backward of .{0,40} is wrong",
        r"(?i)(on|of) all (three )?ranks|every row|all rows (are|have) wrong|rank 2 (is|goes|has|computes) .{0,20}wrong",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
    ],
)
WHY = (
    "The targets are wrong for the rows that are shown at two thirds of the size: row 2 (rank 0, micro-batch 1) and rows 5, 6 (rank 1, micro-batch 1). Their label maps are resized from 12 x 12 to 8 x 8 with bilinear interpolation "
    "and rounded, so pixels at borders between objects get the number of a class that lies between the two (or the other of the two), instead of the class of the nearest pixel. Rank 2 and the other micro-batches are right. The "
    "photos, the whole forward, the logits are right; the loss of these three rows is wrong, hence the gradients of all parameters, equally on all ranks after DDP's average. The count of pixels (divisor), no_sync and the reduction"
    " are right. Fix: mode='nearest' for label maps."
)
