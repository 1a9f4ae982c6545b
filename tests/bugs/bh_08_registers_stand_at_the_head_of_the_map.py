"""Segmentation with a tiny Dinov2WithRegistersModel of transformers (random weights) and a head of one linear layer for each patch, under DDP on two ranks with three micro-batches each (no_sync before the last). Images have 3 x 3 patches;
the backbone gives one class token, two register tokens and nine patch tokens. Patches without a label (-100) do not count; the divisor is the number of labelled patches of both ranks.

The bug: the head takes the nine tokens after the class token, so two registers are the first two patches, all patches are two places late, and the last two are lost. After huggingface/transformers issue 37817 (Dinov2 With Registers
includes register tokens in patch token mean for classifier input) and pull request 37836.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
SIDE, PATCH, REGISTERS, CLASSES, ROWS = 12, 4, 2, 4, 9
PATCHES = (SIDE // PATCH) ** 2
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 6), (6, 7), (7, 9)]]


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        config = Dinov2WithRegistersConfig(
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            mlp_ratio=2,
            image_size=SIDE,
            patch_size=PATCH,
            num_register_tokens=REGISTERS,
            initializer_range=0.4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.backbone = Dinov2WithRegistersModel(config)
        self.backbone.embeddings.mask_token.requires_grad_(False)
        self.head = nn.Linear(config.hidden_size, CLASSES)
        self.skip = 1 + REGISTERS

    def forward(self, pixels):
        tokens = self.backbone(pixel_values=pixels).last_hidden_state
        return self.head(tokens[:, self.skip : self.skip + PATCHES])


class Clean:
    skip = 1 + REGISTERS

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        model = Segmenter()
        with torch.no_grad():
            model.backbone.embeddings.register_tokens.normal_()
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        label = torch.randint(CLASSES, (ROWS, PATCHES), generator=g)
        unknown = torch.rand(ROWS, PATCHES, generator=g) < 0.2
        return {
            "pixels": torch.randn(ROWS, 3, SIDE, SIDE, generator=g),
            "label": label.masked_fill(unknown, -100),
        }

    def loss_sum(self, model, rows):
        scores = model(rows["pixels"]).flatten(0, 1)
        loss = F.cross_entropy(scores, rows["label"].flatten(), reduction="sum")
        return loss, int((rows["label"] >= 0).sum())

    def distribute(self, model, ctx):
        model.skip = self.skip
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        labelled, parts = int((batch["label"] >= 0).sum()), PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss, _ = self.loss_sum(model, rows)
                (loss * ctx.world_size / labelled).backward()


class Buggy(Clean):
    skip = 1


EXPECT = dict(
    right=[
        r"(?i)head|tokens|skip|patch|register|last_hidden",
        r"(?i)between|goes into|input|position|place|slice|index|shift|other (token|position|element|vector)|register|not at these places|getitem",
    ],
    place=[r"(?i)\bhead\b|tokens\[|skip|slice|getitem"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|too (early|late)\b",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"(?i)(backbone|encoder|embeddings|layernorm).{0,30}(forward )?goes wrong",
        r"(?i)only (on )?rank [01]\b|backward formula|other rows|wrong rows",
    ],
)
WHY = (
    "The backbone is right on both ranks, in all micro-batches and rows. Its tokens are class token, 2 registers, 9 patches (0, 1-2, 3-11); the head must read tokens 3-11 and reads tokens 1-9 (tokens[:, skip : skip + 9] with skip 1): the scores of "
    "patches 0 and 1 come from the registers, those of patch p from patch p - 2, and patches 7 and 8 are read by nobody. So the head's input and the loss are wrong, and all gradients. Labels, divisor, DDP, no_sync are right. Fix: "
    "skip = 1 + num_register_tokens."
)
