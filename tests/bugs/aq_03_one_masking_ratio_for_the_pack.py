"""Masked language modelling of proteins with ESM-2 (transformers EsmForMaskedLM, token_dropout) under DDP on three ranks with two micro-batches each, the embedding stage on the packed tokens: the rows of a micro-batch are strung together
without padding, looked up and scaled, and padded again for the encoder. ESM zeroes the embeddings of mask tokens and scales the others of a sequence by (1 - 0.12) / (1 - share of mask tokens in it). Mean over the masked tokens of all
ranks.

The bug: the share of mask tokens is taken over the whole pack, as if it were one sequence, not per sequence. As in the review of the packed (THD) token dropout of ESM-2 in NVIDIA bionemo-recipes (PR 1480) and transformers issue 44162 /
PR 44163 on which lengths enter ESM-2's token dropout.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import EsmConfig, EsmForMaskedLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
VOCABULARY, PAD, MASK, LONGEST = 13, 1, 12, 9
LENGTHS = [9, 4, 6, 7, 5, 9, 3, 8, 6, 5]
MASKED = [1, 2, 2, 1, 3, 2, 1, 1, 3, 1]
PARTS = [[(0, 2), (2, 4)], [(4, 5), (5, 7)], [(7, 9), (9, 10)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        config = EsmConfig(
            vocab_size=VOCABULARY,
            pad_token_id=PAD,
            mask_token_id=MASK,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=12,
            max_position_embeddings=20,
            position_embedding_type="rotary",
            token_dropout=True,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.4,
        )
        self.lm = EsmForMaskedLM(config)
        for p in self.lm.esm.contact_head.parameters():
            p.requires_grad_(False)
        self.whole_pack = False

    def forward(self, ids):
        there = ids != PAD
        lengths = there.sum(1)
        packed = ids[there]
        masked = packed == MASK
        if self.whole_pack:
            share = masked.sum() / torch.tensor(float(len(packed)), dtype=torch.float64)
        else:
            own = (ids == MASK).sum(1).double() / lengths
            share = own.repeat_interleave(lengths)[:, None]
        words = self.lm.esm.embeddings.word_embeddings(packed)
        words = words.masked_fill(masked[:, None], 0.0)
        words = words * ((1 - 0.15 * 0.8) / (1 - share)).to(words.dtype)
        padded = words.new_zeros(*ids.shape, words.shape[-1])
        padded = padded.masked_scatter(there[..., None], words)
        return self.lm(inputs_embeds=padded, attention_mask=there.long()).logits


def lm_loss(model, rows):
    width = int((rows["ids"] != PAD).sum(1).max())
    logits = model(rows["ids"][:, :width]).flatten(0, 1)
    return F.cross_entropy(logits, rows["labels"][:, :width].flatten(), reduction="sum")


class Clean:
    whole_pack = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(2, MASK, (len(LENGTHS), LONGEST), generator=g)
        labels = torch.full_like(ids, -100)
        for row, (length, masked) in enumerate(zip(LENGTHS, MASKED)):
            places = torch.randperm(length, generator=g)[:masked]
            labels[row, places] = ids[row, places]
            ids[row, places] = MASK
            ids[row, length:] = PAD
        return {"ids": ids, "labels": labels}

    def loss_sum(self, model, rows):
        return lm_loss(model, rows), int((rows["labels"] != -100).sum())

    def distribute(self, model, ctx):
        model.whole_pack = self.whole_pack
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        tokens = int((batch["labels"] != -100).sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (lm_loss(model, rows) * ctx.world_size / tokens).backward()


class Buggy(Clean):
    whole_pack = True


EXPECT = dict(
    right=[
        r"(?i)forward|input|output|values?|scal|embedd",
        r"(?i)rows?|sequences?|micro.?batch|pack|batch",
        r"(?i)embedd|input|esm|scal|ratio|share|statistic|other rows|rows beside|coupl|together|depend",
    ],
    place=[r"(?i)embedd|encoder|esm|lm\b"],
    wrong=[
        r"(?i)(not|never) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync.{0,30}(wrong|late|early)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)forward is right|wrong only in the backward|goes wrong in the backward",
        r"(?i)labels? .{0,20}(is|are) (wrong|of)|(attention|padding) mask .{0,20}(is )?wrong",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
    ],
)
WHY = (
    "The scale of the word embeddings is wrong wherever a micro-batch has several rows of different shares. Rank 0: rows 0, 1 (1/9 and 2/4; used for both: 3/13) and rows 2, 3 (2/6 and 1/7; used 3/13). Rank 1: row 4 is alone and right, "
    "rows 5, 6 (2/9 and 1/3; used 3/12). Rank 2: rows 7, 8 (1/8 and 3/6; used 4/14), row 9 alone and right. So the input of the encoder is multiplied by (1 - own share) / (1 - common share) row by row: the forward is wrong from the "
    "embedding stage on, for the rows of micro-batches 0 and 1 of rank 0, micro-batch 1 of rank 1, micro-batch 0 of rank 2; the gradient of the tied word embeddings also gets the wrong scale. Mask tokens are zero either way. Labels, "
    "attention mask, divisor 17, no_sync and reduction are right. Fix: count mask tokens and lengths per sequence (cu_seqlens), not over the pack."
)
