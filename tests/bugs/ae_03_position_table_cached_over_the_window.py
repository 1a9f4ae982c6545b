"""A transformers ViT trained on crops of two sizes (two large, then one small per image, as DINO does it) with interpolated position embeddings, under FSDP2 (fully_shard of every layer and of the root) on two ranks, gradients accumulated over
three micro-batches. Interpolating the table for every crop costs time, so the embedding module keeps the interpolated table by crop size.

The bug: the table is kept for the whole window ("the weights only move at the optimizer step"). Keeping it with its graph made the second backward fail ("Trying to backward through the graph a second time"), so what is kept is detached.
The forward is right for ever, but only the call that computes the table is differentiable; each later crop of that size, in the same and in all later micro-batches, uses a constant. After caches of interpolated position embeddings that people
add to ViTs (for instance tatp22/multidim-positional-encoding #19 for the idea) and the pytorch forum's "backward a second time, so detach".
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers import ViTConfig, ViTModel
from transformers.models.vit.modeling_vit import ViTEmbeddings

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
CHANNELS, LARGE, SMALL, PATCH, CLASSES = 2, 8, 4, 2, 5
MICRO = [[(0, 2), (2, 3), (3, 5)], [(5, 6), (6, 8), (8, 9)]]


class KeptTableEmbeddings(ViTEmbeddings):
    kept = None  # crop size -> table, while a training step keeps tables

    def interpolate_pos_encoding(self, embeddings, height, width):
        if self.kept is None:
            return super().interpolate_pos_encoding(embeddings, height, width)
        if (height, width) in self.kept:
            return self.kept[height, width]
        table = super().interpolate_pos_encoding(embeddings, height, width)
        self.kept[height, width] = table.detach() if self.detach_kept else table
        return table


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        config = ViTConfig(
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=12,
            image_size=6,
            patch_size=PATCH,
            num_channels=CHANNELS,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="eager",
        )
        self.vit = ViTModel(config, add_pooling_layer=False)
        self.vit.embeddings = KeptTableEmbeddings(config)
        self.head = nn.Linear(8, CLASSES)
        nn.init.normal_(self.vit.embeddings.position_embeddings, std=0.5)
        nn.init.normal_(self.vit.embeddings.cls_token, std=0.5)

    def forward(self, large, small):
        total = 0
        for crop in (large[:, 0], large[:, 1], small):
            hidden = self.vit(crop, interpolate_pos_encoding=True).last_hidden_state
            total = total + self.head(hidden[:, 0] + hidden[:, 1:].mean(1))
        return total


class Clean:
    whole_window = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = MICRO[-1][-1][1]
        return {
            "large": torch.randn(rows, 2, CHANNELS, LARGE, LARGE, generator=g),
            "small": torch.randn(rows, CHANNELS, SMALL, SMALL, generator=g),
            "label": torch.randint(CLASSES, (rows,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(
            model(rows["large"], rows["small"]), rows["label"], reduction="sum"
        ), len(rows["label"])

    def distribute(self, model, ctx):
        for layer in model.vit.layers if hasattr(model.vit, "layers") else model.vit.encoder.layer:
            fully_shard(layer, mesh=ctx.mesh)
        return fully_shard(model, mesh=ctx.mesh)

    def step(self, model, batch, ctx):
        table = model.vit.embeddings
        table.detach_kept, table.kept = self.whole_window, {}
        for low, high in MICRO[ctx.rank]:
            part = {k: v[low:high] for k, v in batch.items()}
            loss = F.cross_entropy(
                model(part["large"], part["small"]), part["label"], reduction="sum"
            )
            (loss * ctx.world_size / len(batch["label"])).backward()
            if not self.whole_window:
                table.kept.clear()
        table.kept = None


class Buggy(Clean):
    whole_window = True


EXPECT = dict(
    right=[
        r"(?i)position",
        r"(?i)first (micro.?batch|use|crop|call)|micro.?batch|later|detach|cut|missing|lost|part of|not differentiated|without (a )?gradient|cach|kept|stale|constant|incomplete|dropped|too few|no gradient",
    ],
    place=[r"(?i)position_embeddings|position (table|embedding|encoding)"],
    wrong=[
        r"(?i)not (been )?(all.?|reduce.?scatter)?reduced|reduced twice|summed twice",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward|wrong (positions|table) in the forward",
        r"(?i)cls_token (is|are) wrong|patch_embeddings.{0,40}(is|are) wrong|head\.(weight|bias) (is|are) wrong",
        r"(?i)only (on )?rank [01]\b|rows? .{0,20}(never read|read twice)",
        r"(?i)stale (weights|values|table) .{0,20}forward",
    ],
)
WHY = (
    "Only vit.embeddings.position_embeddings is wrong. Its gradient has, on each rank, only what the first crop of each size in the first micro-batch gives: large crop 0 and the small crop of micro-batch 0 (rows 0, 1 on rank 0, row 5 on rank 1). "
    "Large crop 1 of micro-batch 0 and all crops of micro-batches 1 and 2 took the kept, detached table. The weights do not move inside a window, so the forward, the loss and the gradients of every other parameter (cls_token, patch projection, "
    "layers, head) are exactly right, and so are FSDP's reduction and its divisor. The error is in direction, not a factor. Fix: keep the table within one micro-batch with its graph and clear it after the backward, or do not cache a trained table."
)
