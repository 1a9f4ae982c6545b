"""Transformers' Phi-3 with LongRoPE (two sets of frequency factors: short for sequences up to the
original 6 positions, long beyond them), from a small config, cut along the sequence over two
ranks (6 and 5 of 11 tokens) with position ids of the whole sequence; a registered attention
function gathers keys and values.

Bug: the rotary embedding picks its factors by max(position_ids) + 1 of what it is called with;
the rank with the early part calls it with its own positions, which never exceed the original
length, and rotates by the short factors, the other by the long ones. After context parallelism
put around models with dynamic_rope_update.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import Phi3Config, Phi3ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 2}}}}
VOCAB, TIME, ROWS, ORIGINAL = 29, 11, 5, 6


class GatherSequence(torch.autograd.Function):
    """(rows, heads, own, d) of every rank -> (rows, heads, all, d)."""

    @staticmethod
    def forward(ctx, x, group, sizes):
        rank = dist.get_rank(group)
        padded = F.pad(x, (0, 0, 0, max(sizes) - x.shape[2])).contiguous()
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        ctx.group, ctx.start, ctx.size = group, sum(sizes[:rank]), sizes[rank]
        return torch.cat([p[:, :, :n] for p, n in zip(parts, sizes, strict=True)], 2)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g[:, :, ctx.start : ctx.start + ctx.size], None, None


def attention_over_ranks(module, query, key, value, attention_mask, scaling, **kwargs):
    layout = getattr(module, "layout", None)
    start = 0
    if layout is not None:
        group, sizes = layout
        start = sum(sizes[: dist.get_rank(group)])
        key, value = (GatherSequence.apply(t, group, sizes) for t in (key, value))
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    rows = torch.arange(query.shape[2])[:, None] + start
    scores = query @ key.transpose(-1, -2) * scaling
    scores = scores.masked_fill(torch.arange(key.shape[2])[None] > rows, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("ci_over_ranks", attention_over_ranks)


class WholeSequenceRotary(nn.Module):
    def __init__(self, rotary, total):
        super().__init__()
        self.rotary, self.total = rotary, total

    def forward(self, x, position_ids):
        cos, sin = self.rotary(x, torch.arange(self.total)[None])
        return cos[0][position_ids], sin[0][position_ids]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 51)
        config = Phi3Config(
            vocab_size=VOCAB,
            hidden_size=12,
            intermediate_size=18,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=24,
            original_max_position_embeddings=ORIGINAL,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "short_factor": [1.0, 1.1, 1.3],
                "long_factor": [1.5, 2.5, 4.0],
                "original_max_position_embeddings": ORIGINAL,
            },
            initializer_range=0.3,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attention_dropout=0.0,
            tie_word_embeddings=False,
            use_cache=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            attn_implementation="ci_over_ranks",
        )
        return Phi3ForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 500)
        ids = torch.randint(1, VOCAB, (ROWS, TIME + 1), generator=g)
        return {"ids": ids[:, :-1].contiguous(), "target": ids[:, 1:].contiguous()}

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows["target"].flatten(), reduction="sum")
        return loss, rows["target"].numel()

    def distribute(self, model, ctx):
        group = ctx.group("cp")
        sizes = [len(p) for p in torch.arange(TIME).tensor_split(dist.get_world_size(group))]
        for layer in model.model.layers:
            layer.self_attn.layout = (group, sizes)
        return self.positions(model)

    def positions(self, model):
        model.model.rotary_emb = WholeSequenceRotary(model.model.rotary_emb, TIME)
        return model

    def step(self, model, batch, ctx):
        group = ctx.group("cp")
        own = torch.arange(TIME).tensor_split(dist.get_world_size(group))[dist.get_rank(group)]
        total = batch["target"].numel()
        for lo in range(0, ROWS, 3):
            ids, target = batch["ids"][lo : lo + 3, own], batch["target"][lo : lo + 3, own]
            logits = model(input_ids=ids, position_ids=own[None].expand(len(ids), -1)).logits
            loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
            (loss / total).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def positions(self, model):
        return model


EXPECT = dict(
    right=[
        "rope|rotary|rotat|frequenc|inv_freq|long.?factor|short.?factor",
        "short|long|factor|inv_freq|dynamic|frequenc",
        (
            "local|own|shard|(each|first|early|rank.?0|a) (rank|part)|rank 0|position_ids"
            r"|per.?rank|differ\w* (on|between|across) (the )?rank|slice"
        ),
    ],
    place=[
        "rotary_emb|RotaryEmbedding",
        "dynamic_rope_update|longrope",
        "position_ids",
        "inv_freq",
    ],
    wrong=[
        r"positions? (id\w* )?(restart|start\w* (again )?(from|at) zero)",
        "causal mask",
        "labels? (are )?shift",
        "backward of the gather|GatherSequence.{0,30}(wrong|missing)",
        "(key|kv|value).?heads? (are )?(repeated|tiled) (in )?(the )?wrong",
        "attention.?scaling",
    ],
)
WHY = (
    "LongRoPE's module chooses long or short frequency factors by max(position_ids) + 1 "
    "against the original length of 6. In the cut model each rank calls it with its own "
    "positions: rank 0 has 0..5 and takes the short factors, rank 1 has 6..10 and takes the "
    "long ones, where one process with all 11 takes the long ones everywhere. Queries and "
    "keys of the early part are rotated by other angles, so early rows' attention and the "
    "late queries on early keys are wrong, and nearly all gradients with them (lm_head, "
    "norms, qkv, o, MLP, embedding), equally on both ranks. A right cause says that the "
    "rotary frequencies are picked by the local positions (short factors on rank 0). Fix: "
    "make cos and sin for the whole sequence, or tell the rotary module the whole length, and "
    "then slice."
)
