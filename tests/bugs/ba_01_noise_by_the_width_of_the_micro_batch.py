"""Instruction tuning of a small Llama (transformers) with noisy embeddings (NEFTune) under DDP on two ranks, three micro-batches each of uneven size, cut to their own longest row (no_sync but for the last). The noise is drawn ahead and
comes with the rows, its size is alpha / sqrt(length of the row * width). The divisor is the number of labelled tokens of all ranks.

The bug: the length in the size of the noise is that of the tensor, i.e. of the padded micro-batch, not of the row; shorter rows get too little noise. As in huggingface/transformers issue 34659 and PR 35799 (one scale for the whole
batch).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
LENGTHS = [5, 9, 3, 7, 7, 4, 8, 2, 6, 6, 10]
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 7), (7, 9), (9, 11)]]
VOCABULARY, WIDTH, ALPHA = 13, 8, 5.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                intermediate_size=12,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=16,
                initializer_range=0.3,
                use_cache=False,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
            )
        )

    def forward(self, rows, padded):
        ids, length = rows["ids"], rows["length"]
        x = self.lm.get_input_embeddings()(ids)
        sizes = torch.full_like(length, ids.shape[1]) if padded else length
        size = ALPHA / (sizes * WIDTH).to(x.dtype).sqrt()
        x = x + rows["noise"].to(x.dtype) * size[:, None, None]
        mask = (torch.arange(ids.shape[1])[None] < length[:, None]).long()
        logits = self.lm(inputs_embeds=x, attention_mask=mask).logits
        return F.cross_entropy(
            logits[:, :-1].flatten(0, 1), rows["labels"][:, 1:].flatten(), reduction="sum"
        )


class Clean:
    padded = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        length, widest = torch.tensor(LENGTHS), max(LENGTHS)
        ids = torch.randint(3, VOCABULARY, (len(LENGTHS), widest), generator=g)
        there = torch.arange(widest)[None] < length[:, None]
        return {
            "ids": ids.masked_fill(~there, 0),
            "labels": ids.masked_fill(~there, -100),
            "length": length,
            "noise": torch.rand(len(LENGTHS), widest, WIDTH, generator=g) * 2 - 1,
        }

    def loss_sum(self, model, rows):
        return model(rows, False), int((rows["labels"][:, 1:] != -100).sum())

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        tokens = int((batch["labels"][:, 1:] != -100).sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            widest = int(rows["length"].max())
            rows = {k: v[:, :widest] if v.dim() > 1 else v for k, v in rows.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (model(rows, self.padded) * ctx.world_size / tokens).backward()


class Buggy(Clean):
    padded = True


EXPECT = dict(
    right=[
        r"(?i)embed|inputs_embeds|noise|input of|lm\.model|layers\.0|forward",
        r"(?i)noise|padd|width|length|scale|size|differ|wrong|other|input|forward|not (the )?(own|right)",
        r"(?i)rows?|micro.?batch|short",
    ],
    place=[r"(?i)embed|noise|layers\.0|\brows?\b|input_layernorm"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted twice|too (early|late)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward is right|wrong only in the backward",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)labels? .{0,20}(is|are) (wrong|shifted)|mask.{0,15}(is )?wrong",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
    ],
)
WHY = (
    "In step the noise is scaled by alpha / sqrt(padded width of the micro-batch * WIDTH) for all of its rows. Rows that are shorter than the longest row of their micro-batch get too little noise: row 0 on rank 0 (micro-batch 0), "
    "rows 5, 7 and 9 on rank 1 (micro-batches 0, 1, 2). All other rows are right: rows 1, 2, 3, 4 on rank 0 (rows 3 and 4 are equally long), and 6, 8, 10 on rank 1. The output of the embedding is right, the sum of embedding and noise "
    "is not: the forward goes wrong at the input of the first layer (lm.model.layers.0) for these four rows, and with it the gradients of all parameters, in direction, equally on both ranks after DDP's average. Ids, labels, mask, "
    "divisor (all labelled tokens), no_sync and reduction are right. Fix: use the row's own length."
)
