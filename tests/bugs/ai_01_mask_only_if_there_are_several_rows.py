"""Fine-tuning a small Mamba-2 language model (transformers, from a config) under DDP on three ranks: ten left-padded rows of eight tokens, two micro-batches per rank (no_sync for the first), of two rows each, but the second one of ranks
1 and 2 has a single row. The loss is the sum over all predicted tokens divided by their number on all ranks.

The bug: the padding mask is handed to the model only if the micro-batch has more than one row (one row "needs no padding"). A state-space model has no attention that could ignore the padding: the padding tokens go through the
convolution and the scan into the real ones. As in huggingface/transformers PR 46773 (padding mask skipped for batch size 1 in linear-attention models; apply_mask_to_padding_states asked for attention_mask.shape[0] > 1), see also PR
41790.
"""

import contextlib

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()
TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
VOCABULARY, TOKENS, PAD = 13, 8, 0
LENGTHS = [8, 5, 6, 8, 3, 7, 4, 6, 7, 8]
PARTS = [[(0, 2), (2, 4)], [(4, 6), (6, 7)], [(7, 9), (9, 10)]]


def losses(model, rows, gate):
    ids, mask = rows["ids"], rows["mask"]
    if gate and len(ids) == 1:
        mask = None
    logits = model(input_ids=ids, attention_mask=mask).logits
    there = rows["mask"][:, :-1].bool()
    return F.cross_entropy(logits[:, :-1][there], ids[:, 1:][there], reduction="sum")


class Clean:
    gate = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Mamba2ForCausalLM(
            Mamba2Config(
                vocab_size=VOCABULARY,
                hidden_size=8,
                num_heads=4,
                head_dim=4,
                expand=2,
                state_size=4,
                n_groups=1,
                chunk_size=4,
                conv_kernel=3,
                num_hidden_layers=2,
                initializer_range=0.4,
                use_cache=False,
                pad_token_id=PAD,
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(1, VOCABULARY, (len(LENGTHS), TOKENS), generator=g)
        mask = (torch.arange(TOKENS)[None] >= TOKENS - torch.tensor(LENGTHS)[:, None]).long()
        return {"ids": ids * mask, "mask": mask}

    def loss_sum(self, model, rows):
        return losses(model, rows, False), int(rows["mask"][:, :-1].sum())

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        tokens = int(batch["mask"][:, :-1].sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (losses(model, rows, self.gate) * ctx.world_size / tokens).backward()


class Buggy(Clean):
    gate = True


EXPECT = dict(
    right=[
        r"(?i)rank 1\b|row 6\b|rows? \[?6",
        r"(?i)forward|mixer|layers\.0|mask|padd?(ed|ing)|other (input|tokens|values)|input of",
        r"(?i)wrong|differ|not (the )?(own|right|same)|leak|missing|dropped|without|other|ignored",
    ],
    place=[r"(?i)row 6\b|rows? \[?6|rank 1\b.{0,60}micro.?batch|mixer|layers\.0|mask"],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|reduced (twice|again)|(summed"
        r"|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward is right|wrong only in the backward|goes wrong in the backward",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)"
        r"|rows? 6 .{0,15}never read",
        r"(?i)only (on )?rank [02]\b|rank [02] alone|all (three )?ranks .{0,20}wrong forward",
        r"(?i)labels? .{0,20}(is|are) (wrong|of|shifted)|no_sync .{0,30}(wrong|missing)",
    ],
)
WHY = (
    "Two micro-batches have a single row: rank 1's second (row 6, four tokens behind four paddings) and rank 2's second (row 9, eight tokens, no padding). Both lose their mask; only for row 6 it matters. In the first layer's "
    "mixer the hidden states of the four padding places are not set to zero before and behind the convolution, so that the convolution and the state carry the embedding of token 0 (and biases) into the four real tokens, and "
    "the same again in layer 1: the forward of rank 1, micro-batch 1 goes wrong at backbone.layers.0.mixer (its in_proj gets states that should be zero). The embeddings, the labels, the choice of the predicted places, the "
    "divisor and no_sync are right, as are the forwards of ranks 0 and 2 and of rank 1's first micro-batch. After DDP's average all parameters are wrong on all ranks, equally; the embedding row of the padding token gets a "
    "gradient that should be zero. Fix: always pass the mask."
)
