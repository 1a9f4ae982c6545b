"""Masked-autoencoder pretraining of a tiny VideoMAE (transformers, from a config) on clips of eight patches, DDP on three ranks with two micro-batches of two clips each (no_sync for the first). Every clip has its own number of masked
patches. Clips with equal numbers go through the model together, others one by one. The loss is the sum over masked patches of the mean squared error, divided by the number of masked patches on all ranks.

The bug: the whole micro-batch goes through the model at once. It picks the visible patches with a boolean mask and folds the flat list back with reshape(batch, -1, width), which is only right for equal numbers; for an even total it
raises nothing and patches of one clip land in the sequence of the other. As in huggingface/transformers issue 21484 (each video must have the same number of masked patches; docs and example of bool_masked_pos), compare
pengzhiliang/MAE-pytorch issue 69 (x[~mask].reshape(B, -1, C)).
"""

import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import VideoMAEConfig, VideoMAEForPreTraining

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
PATCHES, CHANNELS, FRAMES, SIDE = 8, 2, 4, 8
MASKED = [4, 6, 5, 5, 3, 5, 6, 6, 4, 4, 2, 6]
PARTS = [[(0, 2), (2, 4)], [(4, 6), (6, 8)], [(8, 10), (10, 12)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mae = VideoMAEForPreTraining(
            VideoMAEConfig(
                image_size=SIDE,
                patch_size=4,
                num_channels=CHANNELS,
                num_frames=FRAMES,
                tubelet_size=2,
                hidden_size=8,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=12,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                initializer_range=0.3,
                decoder_num_attention_heads=2,
                decoder_hidden_size=8,
                decoder_num_hidden_layers=1,
                decoder_intermediate_size=12,
                norm_pix_loss=True,
                attn_implementation="eager",
            )
        )

    def forward(self, clip, masked, together):
        counts = masked.sum(1)
        groups = [counts >= 0] if together else [counts == n for n in counts.unique()]
        loss = 0.0
        for group in groups:
            mean = self.mae(pixel_values=clip[group], bool_masked_pos=masked[group]).loss
            loss = loss + mean * masked[group].sum()
        return loss


class Clean:
    together = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(MASKED)
        order = torch.rand(rows, PATCHES, generator=g).argsort(1).argsort(1)
        return {
            "clip": torch.randn(rows, FRAMES, CHANNELS, SIDE, SIDE, generator=g),
            "masked": order < torch.tensor(MASKED)[:, None],
        }

    def loss_sum(self, model, rows):
        return model(rows["clip"], rows["masked"], False), int(rows["masked"].sum())

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        total = int(batch["masked"].sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = slice(low, high)
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = model(batch["clip"][rows], batch["masked"][rows], self.together)
                (loss * ctx.world_size / total).backward()


class Buggy(Clean):
    together = True


EXPECT = dict(
    right=[
        r"(?i)rows?\b|clips?|videos?|micro.?batch|patch|token",
        r"(?i)other|wrong|foreign|different|mix\w*|shift\w*|resh\w*|not (the )?(own|right)"
        r"|moved|neighbou?r",
        r"(?i)forward|input|embedding|sequence|patch|token|encoder|layer|resh\w*|mae|shape",
    ],
    place=[
        r"(?i)embedding|encoder|layer|resh\w*|patch|visible|mask|mae|rows? \[?(0|1|4|5|10"
        r"|11)\b"
    ],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|reduced (twice|again)|(summed"
        r"|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward is right|wrong only in the backward|goes wrong in the backward",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)"
        r"|only the last micro.?batch",
        r"(?i)only (on )?rank [012]\b|rank [012] alone|all (six )?micro.?batches",
        r"(?i)no_sync .{0,30}(wrong|missing)|patch_embeddings.{0,20}(forward|output) (is"
        r"|goes) wrong",
        r"(?i)decoder (alone|only) (is )?wrong",
    ],
)
WHY = (
    "Three micro-batches hold clips of unequal numbers: rank 0, micro-batch 0 (rows 0, 1: 4 and 6 masked, 4 and 2 visible), rank 1, micro-batch 0 (rows 4, 5: 3 and 5 masked) and rank 2, micro-batch 1 (rows 10, 11: 2 and 6 "
    "masked). There the flat list of visible patches is cut in the middle: the last visible patches of the first clip (one, one and two of them) become the first ones of the second clip's sequence and see its patches in the "
    "attention instead of their own; likewise the first masked patches of the second clip are decoded in the first one's sequence. Position embeddings and labels are folded in the same way, so every patch is still compared "
    "with its own pixels. The forward goes wrong from the output of videomae.embeddings (the encoder's input) on; the convolution of the patches is right. Micro-batches with equal numbers are right. All parameters get another "
    "gradient, equally on all ranks after DDP's average. Divisor 56 and the weighting by masked patches (the micro-batch's total is unchanged) and no_sync are right. Fix: group the clips by their number of masked patches, or "
    "pad and mask."
)
