"""Training of DeiT (transformers, DeiTForImageClassificationWithTeacher) with hard distillation under DDP on three ranks, two micro-batches each of uneven size. The class token's head learns the label, the distillation token's head
learns the class that the teacher gives; the loss is the mean of both cross-entropies. The divisor is the number of images of all ranks.

The bug: both cross-entropies read outputs.logits, which is the mean of the two heads, made for inference, and not cls_logits and distillation_logits. As asked in facebookresearch/deit issue 82 (how the two heads are trained) and put
right in lucidrains/vit-pytorch issue 138 (the hard distillation loss used other logits than those of the distillation token).
"""

import contextlib

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import DeiTConfig, DeiTForImageClassificationWithTeacher

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
CLASSES, ROWS = 5, 11
PARTS = [[(0, 3), (3, 4)], [(4, 6), (6, 8)], [(8, 9), (9, 11)]]


def distillation_loss(model, rows, averaged):
    out = model(pixel_values=rows["image"])
    own = out.logits if averaged else out.cls_logits
    other = out.logits if averaged else out.distillation_logits
    hard = F.cross_entropy(own, rows["label"], reduction="sum")
    return 0.5 * hard + 0.5 * F.cross_entropy(other, rows["teacher"], reduction="sum")


class Clean:
    averaged = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        model = DeiTForImageClassificationWithTeacher(
            DeiTConfig(
                image_size=8,
                patch_size=4,
                num_channels=2,
                hidden_size=8,
                intermediate_size=12,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_labels=CLASSES,
                initializer_range=0.3,
            )
        )
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.1)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(ROWS, 2, 8, 8, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
            "teacher": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return distillation_loss(model, rows, False), len(rows["label"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = distillation_loss(model, rows, self.averaged)
                (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    averaged = True


EXPECT = dict(
    right=[
        r"(?i)loss|logits|output",
        r"(?i)loss|logits|classifier|head|output",
        r"(?i)differ|wrong|other|mean|averag|another|not (the )?(same|right)|mix",
    ],
    place=[r"(?i)cls_classifier|distillation_classifier|logits|\bloss\b|heads?"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted twice|too (early|late)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own (count|number|rows)",
        r"(?i)forward of (the )?(model|deit|encoder|embeddings?).{0,20}wrong|(goes|is) wrong in the forward of (deit|the (encoder|embed))",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)labels? .{0,20}(is|are) shifted|(other|wrong|foreign) images?",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|recomput",
    ],
)
WHY = (
    "The model's forward is right on all ranks, rows and micro-batches: cls_classifier and distillation_classifier give the right logits. The loss of the step reads outputs.logits = (cls_logits + distillation_logits) / 2 in both "
    "terms, instead of cls_logits with the label and distillation_logits with the teacher's class. So both heads get the same gradient at their outputs (the bias gradients of cls_classifier and distillation_classifier are equal), "
    "with both targets mixed, and everything before them is wrong in direction, on all three ranks, all rows and micro-batches, equally after DDP's average. Divisor 11, no_sync, data and reduction are right. Fix: "
    "cross_entropy(out.cls_logits, label) and cross_entropy(out.distillation_logits, teacher)."
)
