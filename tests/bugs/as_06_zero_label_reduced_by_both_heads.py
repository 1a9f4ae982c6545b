"""Semantic segmentation in the manner of ADE20K: a tiny SegFormer encoder (transformers) with a decode head on both feature maps and an auxiliary head (FCN, weight 0.4) on the first, DDP on three ranks, two micro-batches each (no_sync
for the first). The label maps have 0 for background, which does not count: each head's criterion first reduces the labels (0 becomes 255, ignored, all others minus one). Sum of both cross entropies / labelled pixels of all ranks.

The bug: the reduction works in place, so the criterion of the decode head leaves reduced labels behind, and the auxiliary head's criterion, called with the same tensor, reduces them again: class c is learned as c - 1, class 0 is ignored.
As in ViTAE-Transformer/ViTAE-Transformer-Remote-Sensing issue 9 (reduce_zero_label performed twice); in place as in the processors discussed in huggingface/transformers PR 45423.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import SegformerConfig, SegformerModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
SIDE, MAP, CLASSES, IGNORE, AUXILIARY = 12, 6, 4, 255, 0.4
PARTS = [[(0, 2), (2, 3)], [(3, 4), (4, 5)], [(5, 6), (6, 8)]]
ROWS = 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = SegformerModel(
            SegformerConfig(
                num_channels=2,
                num_encoder_blocks=2,
                depths=[1, 1],
                sr_ratios=[2, 1],
                hidden_sizes=[6, 8],
                patch_sizes=[3, 3],
                strides=[2, 2],
                num_attention_heads=[1, 2],
                mlp_ratios=[2, 2],
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                drop_path_rate=0.0,
                initializer_range=0.3,
            )
        )
        self.decode_head = nn.Conv2d(14, CLASSES, 1)
        self.auxiliary_head = nn.Sequential(
            nn.Conv2d(6, 6, 3, padding=1), nn.SiLU(), nn.Conv2d(6, CLASSES, 1)
        )

    def forward(self, image):
        maps = self.encoder(image, output_hidden_states=True).hidden_states
        fine = maps[0]
        coarse = F.interpolate(maps[1], (MAP, MAP), mode="bilinear", align_corners=False)
        return self.decode_head(torch.cat([fine, coarse], 1)), self.auxiliary_head(fine)


def reduce_labels(labels):
    """Background (0) becomes ignored (255), every other class one less; in place."""
    labels[labels == 0] = IGNORE
    labels -= 1
    labels[labels == IGNORE - 1] = IGNORE
    return labels


def criterion(logits, labels, in_place):
    labels = reduce_labels(labels if in_place else labels.clone())
    return F.cross_entropy(logits, labels.long(), ignore_index=IGNORE, reduction="sum")


def segmentation_loss(model, image, labels, in_place):
    main, auxiliary = model(image)
    loss = criterion(main, labels, in_place)
    return loss + AUXILIARY * criterion(auxiliary, labels, in_place)


class Clean:
    in_place = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(ROWS, 2, SIDE, SIDE, generator=g),
            "labels": torch.randint(CLASSES + 1, (ROWS, MAP, MAP), generator=g).to(torch.uint8),
        }

    def loss_sum(self, model, rows):
        loss = segmentation_loss(model, rows["image"], rows["labels"], False)
        return loss, int((rows["labels"] > 0).sum())

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        count = int((batch["labels"] > 0).sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            # what a loader hands over: own tensors of the micro-batch
            image, labels = batch["image"][low:high].clone(), batch["labels"][low:high].clone()
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = segmentation_loss(model, image, labels, self.in_place)
                (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    in_place = True


EXPECT = dict(
    right=[
        r"(?i)auxiliary|\baux\b",
        r"(?i)loss|labels?|target|gradient (at|of|that|into|with respect)|criterion"
        r"|objective|another",
        r"(?i)wrong|differ|other|shift|twice|again|not the|deviat|in place|reduced",
    ],
    place=[r"(?i)auxiliary(_head)?|\baux\b|labels?"],
    wrong=[
        r"(?i)decode_head\S* .{0,15}(is|are|goes) wrong",
        r"(?i)not (been )?all.?reduced|(gradients?|parameters?) .{0,25}(reduced|summed"
        r"|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[2-9]\b",
        r"(?i)forward (is|goes|was) wrong|goes wrong in the forward",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|no_sync.{0,40}(wrong|missing)",
        r"(?i)(only|just) (on )?rank [012]\b|rank [012] alone",
        r"(?i)weight of (the )?auxiliary .{0,40}(wrong|twice)|auxiliary (loss"
        r"|term) .{0,20}(missing|dropped|counted twice)",
    ],
)
WHY = (
    "The forward is right: both heads give the right logits on all ranks. The decode head's loss uses once-reduced labels (right) and changes the tensor; the auxiliary head's loss uses labels reduced twice: raw class 1 (target 0) "
    "becomes 255 and is ignored, raw classes 2, 3, 4 (targets 1, 2, 3) become 0, 1, 2, background stays ignored. All ranks, all micro-batches, all rows. So the gradient of the auxiliary term is wrong: that of auxiliary_head "
    "altogether, and that part of the first encoder block's (patch embedding 0, block 0, layer norm 0) that comes through the auxiliary head; decode_head and the second encoder block are right. The weight 0.4, the divisor (pixels "
    "with raw label > 0), no_sync and the reduction are right. Fix: reduce a copy, or once per micro-batch."
)
