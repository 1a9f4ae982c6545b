"""Granite (transformers) with Ulysses sequence parallelism: an attention function of one's own, registered with transformers' AttentionInterface, exchanges heads for positions (all-to-all), attends over the whole sequence with its own heads
and exchanges back. Two data ranks (3 and 2 rows, micro-batches of one row) times two sequence ranks, labels shifted before the sequence is cut, gradients summed over all four ranks.

The bug: the registered function takes `scaling` among its arguments, as the interface demands, and does not use it: scaled_dot_product_attention falls back to 1/sqrt(head_dim). That is right for Llama, for which the function was written, and
wrong for models with a scaling of their own (Granite: attention_multiplier, Gemma: query_pre_attn_scalar). After the kind of huggingface/transformers #38277 / PR #38290 (OPT: attention scaling of the attention functions against the model's
own) and tenstorrent/tt-metal #22810 (Gemma3's query_pre_attn_scalar ignored).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, GraniteConfig, GraniteForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "sp": 2}}}}
LENGTH, WORDS, MULTIPLIER = 10, 21, 1.3
ROWS_OF = [(0, 3), (3, 5)]
SETTINGS = {}


class Exchange(torch.autograd.Function):
    """Cuts the dimension `cut` among the ranks and joins their pieces along `join`; the adjoint is the exchange back."""

    @staticmethod
    def forward(ctx, x, cut, join, group):
        ctx.dims, ctx.group = (join, cut), group
        return Exchange.move(x, cut, join, group)

    @staticmethod
    def move(x, cut, join, group):
        out = torch.stack(x.chunk(dist.get_world_size(group), cut)).contiguous()
        received = torch.empty_like(out)
        dist.all_to_all_single(received, out, group=group)
        return torch.cat(received.unbind(0), join)

    @staticmethod
    def backward(ctx, grad):
        return Exchange.move(grad, *ctx.dims, ctx.group), None, None, None


def ulysses(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    group = SETTINGS["group"]
    query, key, value = (Exchange.apply(x, 1, 2, group) for x in (query, key, value))
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scale = scaling if SETTINGS["use_scaling"] else None
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return Exchange.apply(out, 2, 1, group).transpose(1, 2).contiguous(), None


AttentionInterface.register("ulysses_ae04", ulysses)


class Clean:
    use_scaling = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = GraniteConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=20,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            attention_multiplier=MULTIPLIER,
            embedding_multiplier=6.0,
            residual_multiplier=0.7,
            logits_scaling=0.5,
            initializer_range=0.2,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
        return GraniteForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = ROWS_OF[-1][1]
        ids = torch.randint(WORDS, (rows, LENGTH), generator=g)
        labels = torch.cat([ids[:, 1:], torch.full((rows, 1), -100)], 1)
        first = torch.tensor([3, 1, 4, 0, 2])
        return {
            "ids": ids,
            "labels": labels.masked_fill(torch.arange(LENGTH)[None] < first[:, None], -100),
        }

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], use_cache=False).logits
        loss = F.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), ignore_index=-100, reduction="sum"
        )
        return loss, int((rows["labels"] != -100).sum())

    def distribute(self, model, ctx):
        model.config._attn_implementation = "ulysses_ae04"
        return model

    def step(self, model, batch, ctx):
        SETTINGS.update(group=ctx.group("sp"), use_scaling=self.use_scaling)
        tokens = int((batch["labels"] != -100).sum())
        share = LENGTH // ctx.axes["sp"]
        start = share * ctx.coords["sp"]
        positions = torch.arange(start, start + share)[None]
        low, high = ROWS_OF[ctx.coords["dp"]]
        for row in range(low, high):
            ids, labels = (
                batch[k][row : row + 1, start : start + share] for k in ("ids", "labels")
            )
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            loss = F.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
            )
            (loss / tokens).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp", "sp"))


class Buggy(Clean):
    use_scaling = False


EXPECT = dict(
    right=[
        r"(?i)attention|attn|self_attn|ulysses|softmax|scores",
        r"(?i)forward|scal(e|ing)|multiplier|temperature|1/sqrt|factor|activation|output",
    ],
    place=[r"(?i)attention|attn|ulysses|scores"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted twice|missing reduction",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)forward is right|wrong only in the backward|(backward|adjoint) of (the )?(exchange|all.?to.?all|collective).{0,30}wrong",
        r"(?i)positions? .{0,30}(restart|from zero|wrong)|rotary.{0,20}wrong|heads .{0,20}(exchanged|permuted|in (the )?wrong order|of (the )?other rank)",
        r"(?i)labels? .{0,30}(shifted|wrong)|mask.{0,20}(missing|wrong|not applied)",
        r"(?i)rows? .{0,20}(never read|read twice|dropped)|micro.?batch.{0,20}(lost|dropped|overwritten)",
        r"(?i)only (on )?rank [0123]\b",
    ],
)
WHY = (
    "The attention scores of all heads, rows and ranks are multiplied by 1/sqrt(4) = 0.5 instead of Granite's attention_multiplier 1.3, so the softmax in both layers is too flat. The forward goes wrong first in the attention of layer 0 (its "
    "inputs q, k, v, rotary positions, exchange and causal order are right), on all four ranks alike and in all micro-batches; loss and the gradients of nearly all parameters are therefore wrong in direction, not by a factor. Labels, divisor, "
    "all-to-all and its adjoint, the reduction over dp and sp are right. Fix: scale=scaling in the registered function."
)
