"""Fine-tuning a tiny MistralForCausalLM with a sliding window of three tokens under DDP on three ranks, two micro-batches each (no_sync for the first). The machine of rank 1 has a fast attention kernel, registered with transformers as
`fast_window`, the other two use eager attention. The divisor is the number of predicted tokens of all ranks.

The bug: the kernel takes the window as the number of tokens to the left of the own one (as window_size of flash-attention), the library as their number with the own one. It is handed config.sliding_window as it is, and every token of
rank 1 sees one token more. After huggingface/transformers issue 29623 (sliding window differs between eager and FlashAttention-2), compare unslothai/unsloth PR 8253.
"""

import contextlib

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import MistralConfig, MistralForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
VOCABULARY, TOKENS, WINDOW = 12, 8, 3
LENGTHS = [8, 5, 7, 6, 8, 3, 7, 4, 8, 6, 5]
PARTS = [[(0, 2), (2, 3)], [(3, 5), (5, 8)], [(8, 9), (9, 11)]]


def fast_window(module, query, key, value, attention_mask, scaling, left, **kwargs):
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    place = torch.arange(query.shape[2])
    back = place[:, None] - place[None, :]
    scores = (query @ key.transpose(2, 3)) * scaling
    scores = scores.masked_fill((back < 0) | (back > left), float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def word_loss(model, rows):
    width = int(rows["length"].max())
    ids = rows["ids"][:, :width]
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    beyond = torch.arange(1, width)[None] >= rows["length"][:, None]
    target = ids[:, 1:].masked_fill(beyond, -100)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")


class Clean:
    own_token = 1

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
            max_position_embeddings=TOKENS,
            sliding_window=WINDOW,
            initializer_range=0.4,
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
        return word_loss(model, rows), int((rows["length"] - 1).sum())

    def distribute(self, model, ctx):
        if ctx.rank == 1:
            own = self.own_token

            def attention(module, q, k, v, mask, scaling, sliding_window=None, **kwargs):
                return fast_window(module, q, k, v, mask, scaling, sliding_window - own)

            ALL_ATTENTION_FUNCTIONS.register("fast_window", attention)
            model.config._attn_implementation = "fast_window"
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        words = int((batch["length"] - 1).sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (word_loss(model, rows) * ctx.world_size / words).backward()


class Buggy(Clean):
    own_token = 0


EXPECT = dict(
    right=[
        r"(?i)attention|attn|self_attn|o_proj|softmax|window|mask",
        r"(?i)rank 1\b|ranks? \[?1\]?\b|\(1,?\)",
        r"(?i)forward|window|mask|output|input of|other scores|computes|attend",
    ],
    place=[r"(?i)attn|attention|o_proj|window"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|no_sync.{0,40}(wrong"
        r"|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)wrong only in the backward|backward of .{0,40}is wrong|forward is right",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"(?i)(on )?all (three )?ranks .{0,40}forward|rank 0 (alone|is wrong)|rank 2 (alone"
        r"|is wrong)",
        r"(?i)labels? .{0,20}wrong|other rows|wrong rows|layers?[ .]1 .{0,30}(first|alone)",
    ],
)
WHY = (
    "On rank 1 the attention of both layers lets every token see three tokens to its left and itself, so four, where the model's window of three includes the own token. The forward of rank 1 goes wrong in layers[0].self_attn "
    "(output of the attention function, so the input of o_proj) "
    "from the fourth token of a row on; the rows' first three tokens are right, so row 5 (three tokens) is. Both micro-batches of rank 1 (rows 3-4 and 5-7); ranks 0 and 2 are right in the forward. The gradient of rank 1 is wrong "
    "for all parameters, "
    "and so is DDP's average on all ranks. Divisor, no_sync, reduction, targets and positions are right. Fix: hand the kernel sliding_window - 1."
)
