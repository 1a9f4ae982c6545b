"""A tiny MistralForCausalLM with a sliding window of 4 under FSDP2 (fully_shard of every layer and the root) on three ranks, two micro-batches each, texts of 2 to 9 tokens. Each micro-batch is trimmed to its longest text and gets a
four-dimensional mask made by the training loop. Gradients are reduced in the last micro-batch; divisor: predicted tokens of all ranks.

The bug: the loop's mask lets a token see `window` tokens before it and itself (distance <= window), Mistral's own mask `window` tokens with itself (distance < window). After huggingface/transformers issues 39408 (Off-by-one error when
using flash_attention with a sliding window) and 29623.
"""

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers import MistralConfig, MistralForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
VOCABULARY, TOKENS, WINDOW = 11, 9, 4
LENGTHS = [3, 4, 9, 4, 2, 3, 7, 4, 5]
PARTS = [[(0, 2), (2, 3)], [(3, 4), (4, 6)], [(6, 8), (8, 9)]]


def text_loss(model, rows, mask):
    logits = model(input_ids=rows["ids"], attention_mask=mask, use_cache=False).logits
    place = torch.arange(1, rows["ids"].shape[1])
    target = rows["ids"][:, 1:].masked_fill(place[None] >= rows["length"][:, None], -100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), target.flatten(), reduction="sum")


def band(rows, reach, dtype):
    """Additive mask (rows, 1, queries, keys): causal, at most `reach` tokens back."""
    place = torch.arange(rows["ids"].shape[1])
    back = place[:, None] - place[None, :]
    seen = (back >= 0) & (back <= reach)
    real = place[None] < rows["length"][:, None]
    seen = seen[None] & (real[:, None, :] | (back == 0)[None])
    mask = torch.zeros(seen.shape, dtype=dtype)
    return mask.masked_fill(~seen, torch.finfo(dtype).min)[:, None]


class Clean:
    reach = WINDOW - 1

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = MistralConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=4,
            max_position_embeddings=TOKENS,
            sliding_window=WINDOW,
            initializer_range=0.5,
        )
        config._attn_implementation = "eager"
        return MistralForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (len(LENGTHS), TOKENS), generator=g),
            "length": torch.tensor(LENGTHS),
        }

    def loss_sum(self, model, rows):
        mask = (torch.arange(TOKENS)[None] < rows["length"][:, None]).long()
        return text_loss(model, rows, mask), int((rows["length"] - 1).sum())

    def distribute(self, model, ctx):
        for layer in model.model.layers:
            fully_shard(layer, mesh=ctx.mesh)
        fully_shard(model, mesh=ctx.mesh)
        return model

    def step(self, model, batch, ctx):
        tokens = int((batch["length"] - 1).sum())
        dtype = next(model.parameters()).dtype
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            rows["ids"] = rows["ids"][:, : int(rows["length"].max())]
            model.set_requires_gradient_sync(turn == len(parts) - 1)
            loss = text_loss(model, rows, band(rows, self.reach, dtype))
            (loss * ctx.world_size / tokens).backward()


class Buggy(Clean):
    reach = WINDOW


EXPECT = dict(
    right=[
        r"(?i)attention|self_attn|mask|window|layers?\.0|band",
        r"(?i)forward|mask|window|off.by.one|position|token|value",
        r"(?i)long|length|later (tokens|positions|places)|position|token|place|rows? (2|6)\b|(some|few|two) rows|rows 2|micro.?batch|"
        r"rank 0|rank 2|ranks 0|mask|window",
    ],
    place=[r"(?i)self_attn|attention|mask|layers?\.0|window"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|(gradient )?sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"(?i)labels? .{0,20}(is|are) wrong|dropout",
        r"(?i)rank 1.{0,25}(goes|is|are) wrong|all ranks.{0,20}(go|are) wrong|every row|all rows",
        r"(?i)forward is right|goes wrong (first |only )?in the backward|detach|recomput",
    ],
)
WHY = (
    "The mask of the loop (band) with reach = 4 lets a query see the key at distance 4, one more than Mistral's window of 4 allows (distances 0 to 3). Only queries at place 4 or later that are scored matter: row 2 (length 9: rank 0, "
    "micro-batch 1) and row 6 (length 7: rank 2, micro-batch 0). Rows of length 5 or less are right (in row 8 the query at place 4 is the last token and is not scored, its hidden state is wrong without effect). Rank 1 is right. The "
    "forward goes wrong in self_attn of layer 0 at places >= 4; all parameters' gradients are wrong. Sharding, sync flag, divisor, labels and padding are right. Fix: reach = WINDOW - 1 (distance < window)."
)
