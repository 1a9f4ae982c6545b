"""A Llama (transformers, from a small config, grouped queries) under context parallelism: three ranks hold three positions each of every sequence, rotary positions are passed, and the attention registered with
transformers' AttentionInterface gathers keys and values and attends block by block, as ring attention does: own block causal, earlier ranks' blocks whole, the blocks' results merged by their log-sum-exp. The block
kernel returns the log-sum-exp in base two, as flashinfer's kernels do (they work with exp2). Two micro-batches; all parameters are summed over the ranks.

The bug: the merge takes the log-sum-exp for a natural logarithm and weights the blocks with exp instead of exp2. After flashinfer's documentation (merge_state wants base-2 lse) and the reports about mixing its lse
with that of flash-attention in context parallel / cascade code.
"""

import math

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, LENGTH, VOCABULARY = 5, 9, 23


class GatherBlocks(torch.autograd.Function):
    """The blocks of all ranks; each rank uses them for its own queries."""

    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        blocks = [
            torch.empty_like(x, memory_format=torch.contiguous_format)
            for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(blocks, x.contiguous(), group=group)
        return torch.stack(blocks)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad[dist.get_rank(fctx.group)], None


def block_attention(q, k, v, scaling, causal):
    """Attention over one block and its log-sum-exp in base two."""
    scores = q @ k.transpose(-1, -2) * scaling
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True) / math.log(2)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=20,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            initializer_range=0.4,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
        return LlamaForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], use_cache=False).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum")
        return loss, rows["labels"].numel()

    def merge(self, outputs, lses):
        lse = torch.stack(lses)
        weights = torch.exp2(lse - lse.amax(0))
        return (torch.stack(outputs) * weights).sum(0) / weights.sum(0)

    def distribute(self, model, ctx):
        rank, group = ctx.coords["cp"], ctx.group("cp")

        def context_parallel(module, query, key, value, attention_mask, scaling, **kwargs):
            groups = query.shape[1] // key.shape[1]
            keys = GatherBlocks.apply(key.repeat_interleave(groups, 1), group)
            values = GatherBlocks.apply(value.repeat_interleave(groups, 1), group)
            outputs, lses = [], []
            for source in range(rank + 1):
                out, lse = block_attention(
                    query, keys[source], values[source], scaling, source == rank
                )
                outputs.append(out)
                lses.append(lse)
            return self.merge(outputs, lses).transpose(1, 2).contiguous(), None

        AttentionInterface.register("context_parallel", context_parallel)
        model.set_attn_implementation("context_parallel")
        return model

    def step(self, model, batch, ctx):
        size, rank = ctx.axes["cp"], ctx.coords["cp"]
        for p in model.parameters():
            p.grad = None
        positions = torch.arange(LENGTH).chunk(size)[rank]
        for n in range(2):
            ids, labels = (batch[k].tensor_split(2)[n][:, positions] for k in ("ids", "labels"))
            logits = model(
                input_ids=ids, position_ids=positions[None].expand_as(ids), use_cache=False
            ).logits.flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
            (loss / batch["labels"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("cp"))


class Buggy(Clean):
    def merge(self, outputs, lses):
        lse = torch.stack(lses)
        weights = torch.exp(lse - lse.amax(0))
        return (torch.stack(outputs) * weights).sum(0) / weights.sum(0)


EXPECT = dict(
    right=[
        r"merg|combin|weights? of the blocks|block|log.?sum.?exp|lse|attention|softmax|exp2|base",
        r"merg|combin|weight|base|exp2|natural|log.?sum.?exp|lse|normali[sz]|forward|temperature",
    ],
    place=[
        r"\bmerge\b",
        r"context_parallel|block_attention",
        r"lse|exp\b|weights",
        r"attention|self_attn",
    ],
    wrong=[
        r"(not|never) reduced|missing (all.?)?reduc|reduced (twice|again)|counted (twice|three times)",
        r"divisor|denominator of the (loss|tokens)|mean of means|wrong count",
        r"micro.?batch.{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"GatherBlocks.{0,40}(wrong|adjoint|missing)|without gradient|detached",
        r"positions? .{0,30}(wrong|local|restart)|causal mask|wrong rows",
    ],
)
WHY = (
    "block_attention returns log2 of the sum of exponentials. merge weights the blocks by exp(lse) and so by a power 1/ln 2 of what they should have: the heavier block gets too much. Rank 0 has only one block and its "
    "attention is right, ranks 1 and 2 merge two and three blocks and have wrong outputs in both layers; as the parameters are summed over the ranks, the gradients are wrong everywhere. A right cause says that the "
    "merging of the attention blocks (weights, lse, its base) is wrong in the forward of ranks 1 and 2. Fix: exp2."
)
