"""Fine-tuning a tiny MistralForCausalLM (sliding window of 3 tokens, two layers) under FSDP2 on two ranks, three micro-batches of uneven size each; gradients are synchronised in the last. Attention is registered with transformers: the
queries go in blocks of four, and each block reads only the keys that its window can reach. Texts have unlike lengths (padded on the right, without loss); the divisor is the number of predicted tokens of all ranks.

The bug: the window is handed on as the number of tokens to look back, as flash-attention counts, where a sliding window of 3 means the token itself and two before. After huggingface/transformers issue 39408 (Off-by-one error when using
flash_attention with a sliding window), PR 40163, and issue 29623.
"""

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers import AttentionInterface, MistralConfig, MistralForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
WORDS, TOKENS, WINDOW, BLOCK = 12, 9, 3, 4
LENGTHS = [9, 3, 7, 8, 9, 4, 6, 9, 5, 9, 2]
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 6), (6, 9), (9, 11)]]


def blocks(module, query, key, value, attention_mask, scaling, sliding_window, **kwargs):
    """Causal attention of blocks of queries; a query looks back `behind` tokens."""
    behind = sliding_window - getattr(module.config, "own_token", 1)
    many = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(many, 1), value.repeat_interleave(many, 1)
    out = []
    for first in range(0, query.shape[2], BLOCK):
        last = min(first + BLOCK, query.shape[2])
        begin = max(0, first - behind)
        back = torch.arange(first, last)[:, None] - torch.arange(begin, last)
        scores = query[:, :, first:last] @ key[:, :, begin:last].transpose(2, 3) * scaling
        scores = scores.masked_fill((back < 0) | (back > behind), -torch.inf)
        out.append(scores.softmax(-1) @ value[:, :, begin:last])
    return torch.cat(out, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register("blocks", blocks)


def text_loss(model, rows):
    logits = model(input_ids=rows["ids"], use_cache=False).logits[:, :-1]
    place = torch.arange(1, TOKENS)
    target = rows["ids"][:, 1:].masked_fill(place >= rows["length"][:, None], -100)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")


class Clean:
    own_token = 1

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = MistralConfig(
            vocab_size=WORDS,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            max_position_embeddings=16,
            sliding_window=WINDOW,
            initializer_range=0.5,
            tie_word_embeddings=False,
        )
        config._attn_implementation = "eager"
        return MistralForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(1, WORDS, (len(LENGTHS), TOKENS), generator=g)
        return {"ids": ids, "length": torch.tensor(LENGTHS)}

    def loss_sum(self, model, rows):
        return text_loss(model, rows), int((rows["length"] - 1).sum())

    def distribute(self, model, ctx):
        model.config._attn_implementation = "blocks"
        model.config.own_token = self.own_token
        for layer in model.model.layers:
            fully_shard(layer, mesh=ctx.mesh)
        return fully_shard(model, mesh=ctx.mesh)

    def step(self, model, batch, ctx):
        count = int((batch["length"] - 1).sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            model.set_requires_gradient_sync(turn == len(parts) - 1)
            rows = {k: v[low:high] for k, v in batch.items()}
            (text_loss(model, rows) * ctx.world_size / count).backward()


class Buggy(Clean):
    own_token = 0


EXPECT = dict(
    right=[
        r"(?i)self_attn|attention|window|mask",
        r"(?i)forward|window|mask|look|attends|keys|value|output",
    ],
    place=[r"(?i)self_attn|attention|blocks|window"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|set_requires_gradient_sync.{0,40}wrong",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the (first|last) micro.?batch",
        r"(?i)only (on )?rank [01]\b|rank [01] alone|only layers?\.? ?[01]\b|layers\.1 alone",
        r"(?i)labels? .{0,20}(is|are) (wrong|of)|rotary.{0,20}wrong|padding (is|takes)|recomput",
        r"(?i)(?<!not )(mlp|q_proj|k_proj|v_proj|input_layernorm|embed_tokens)(\.\w+)? (goes|is) (first )?wrong in the forward",
    ],
)
WHY = (
    "In the registered attention `blocks` (both layers, all ranks and micro-batches) a query looks back sliding_window tokens, four tokens with its own, where the model's window is 3 (own_token = 1: behind = sliding_window - 1). Every token from "
    "place 3 on attends to one token too many, so the forward goes wrong first in layers.0.self_attn, between q/k/v_proj and o_proj; places 0-2 of a text are right (rows 1, 5 and 10, of lengths 3, 4 and 2, are scored at places 0-2 only and are right). All parameters' gradients are "
    "wrong. Causality, blocks, FSDP2, sync, divisor, labels are right. Fix: window minus one."
)
