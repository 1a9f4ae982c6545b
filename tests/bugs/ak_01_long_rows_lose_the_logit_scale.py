"""Instruction tuning of a tiny Granite (transformers) under DDP on three ranks with two micro-batches each (no_sync for the first), right-padded and trimmed to the longest row of the micro-batch. Micro-batches wider than eight tokens take
the memory-saving path: the decoder's hidden states are cut into pieces of five tokens and head and cross entropy are done piece by piece.

The bug: the piecewise path multiplies with the head's weight and leaves out Granite's logits_scaling, by which the model's own forward divides the logits. As in unslothai/unsloth PR 11277 (the fused cross entropy path drops the logit
scale of Cohere and Granite).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import GraniteConfig, GraniteForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
VOCABULARY, LONGEST, WIDE, PIECE = 19, 12, 8, 5
LENGTHS = [6, 8, 7, 12, 5, 7, 4, 8, 6, 9, 11, 8]
PROMPTS = [2, 3, 1, 4, 2, 3, 1, 2, 3, 2, 5, 1]
PARTS = [[(0, 2), (2, 5)], [(5, 6), (6, 8)], [(8, 11), (11, 12)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm = GraniteForCausalLM(
            GraniteConfig(
                vocab_size=VOCABULARY,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=32,
                logits_scaling=3.0,
                embedding_multiplier=2.0,
                residual_multiplier=0.7,
                attention_multiplier=0.4,
                initializer_range=0.3,
                tie_word_embeddings=False,
                use_cache=False,
                pad_token_id=0,
            )
        )

    def forward(self, ids, mask, labels, pieces=False, scaled=True):
        labels = labels[:, 1:]
        if not pieces:
            logits = self.lm(input_ids=ids, attention_mask=mask).logits[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        hidden = self.lm.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, :-1]
        scale = self.lm.config.logits_scaling if scaled else 1.0
        total = hidden.new_zeros(())
        for h, y in zip(hidden.flatten(0, 1).split(PIECE), labels.flatten().split(PIECE)):
            total = total + F.cross_entropy(self.lm.lm_head(h) / scale, y, reduction="sum")
        return total


class Clean:
    scaled = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(1, VOCABULARY, (len(LENGTHS), LONGEST), generator=g)
        place = torch.arange(LONGEST)[None]
        mask = (place < torch.tensor(LENGTHS)[:, None]).long()
        ids = ids * mask
        answer = (mask > 0) & (place >= torch.tensor(PROMPTS)[:, None])
        return {"ids": ids, "mask": mask, "labels": ids.masked_fill(~answer, -100)}

    def loss_sum(self, model, rows):
        return model(rows["ids"], rows["mask"], rows["labels"]), int(
            (rows["labels"][:, 1:] != -100).sum()
        )

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        tokens = int((batch["labels"][:, 1:] != -100).sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            width = int(rows["mask"].sum(1).max())
            rows = {k: v[:, :width] for k, v in rows.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = model(rows["ids"], rows["mask"], rows["labels"], width > WIDE, self.scaled)
                (loss * ctx.world_size / tokens).backward()


class Buggy(Clean):
    scaled = False


EXPECT = dict(
    right=[
        r"(?i)lm_head|head|logit|loss",
        r"(?i)micro.?batch|rows?|piece|chunk|long|wide",
        r"(?i)loss|logit|forward|scal|temperature|derivative|softmax|cross.?entropy|output",
        r"(?i)rank|row",
    ],
    place=[r"(?i)lm_head|head|logit|loss"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted twice|"
        r"no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)(attention )?mask .{0,30}(wrong|missing|ignored)|padding is attended",
        r"(?i)labels? .{0,20}(is|are) (wrong|shifted)|prompt .{0,30}(scored|counted)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone|all (three )?ranks.{0,30}(all|every|"
        r"both) micro.?batch",
        r"(?i)(self_attn|mlp|layernorm|norm)\S* .{0,20}(computes|forward|output).{0,20}wrong",
    ],
)
WHY = (
    "Only micro-batches wider than 8 tokens take the piecewise path: rank 0 micro-batch 1 (rows 2, 3, 4: row 3 has 12 tokens) and rank 2 micro-batch 0 (rows 8, 9, 10: rows 9 and 10 have 9 and 11). There the logits of all rows, the "
    "short ones too, are not divided by logits_scaling 3.0, so the loss is another function of the same hidden states (softmax three times as sharp; its gradient by the logits is not a multiple of the right one, and by the hidden "
    "states is three times as large besides). The decoder's hidden states are right; the loss, and with it every gradient (lm_head and everything below), is wrong in direction. Rank 1 and the other micro-batches of ranks 0 and 2 "
    "are right; DDP's average puts the same wrong gradient on all ranks. Labels, masks, trimming, divisor (answer tokens of all ranks) and no_sync are right. Fix: divide the pieces' logits by config.logits_scaling."
)
