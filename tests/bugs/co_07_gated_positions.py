"""transformers' WavLM (speech) as a classifier of utterances, tensor parallel over two ranks: three
heads (2 and 1) with their queries, keys, values, position biases and gate constants, out_proj by
columns. Everything else is computed by both ranks. Five recordings in micro-batches of two.

WavLM adds a relative position bias to the scores that is scaled by a gate of the hidden state: a
linear layer gives eight numbers for each head and position, the first four are summed for gate a,
the last four for gate b.

Bug: the attention of the ranks sums every other number (0, 2, 4, 6 for a, 1, 3, 5, 7 for b). After
ports of WavLM's gated bias that view the eight numbers as (4, 2) instead of (2, 4).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import WavLMConfig, WavLMForSequenceClassification

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 2}}}}
ROWS, SAMPLES, HIDDEN, HEADS, CLASSES = 5, 62, 12, 3, 4
SIZE = HIDDEN // HEADS


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


def halves(numbers):
    return numbers.view(*numbers.shape[:-1], 2, 4).sum(-1)


def pairs(numbers):
    return numbers.view(*numbers.shape[:-1], 4, 2).sum(-2)


class HeadAttention(nn.Module):
    def __init__(self, whole, first, last, group, gates):
        super().__init__()
        self.group, self.first, self.last, self.gates = group, first, last, gates
        a, b = first * SIZE, last * SIZE
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = getattr(whole, name)
            linear.weight = nn.Parameter(linear.weight.detach()[a:b].clone())
            linear.bias = nn.Parameter(linear.bias.detach()[a:b].clone())
            setattr(self, name, linear)
        self.out_proj = whole.out_proj
        self.out_proj.weight = nn.Parameter(self.out_proj.weight.detach()[:, a:b].clone())
        self.gru_rel_pos_const = nn.Parameter(
            whole.gru_rel_pos_const.detach()[:, first:last].clone()
        )
        self.gru_rel_pos_linear = whole.gru_rel_pos_linear
        self.bucket = whole._relative_positions_bucket
        if hasattr(whole, "rel_attn_embed"):
            self.rel_attn_embed = whole.rel_attn_embed
            table = self.rel_attn_embed.weight.detach()[:, first:last].clone()
            self.rel_attn_embed.weight = nn.Parameter(table)

    def bias(self, length):
        place = torch.arange(length)
        table = self.rel_attn_embed.weight
        return table[self.bucket(place[None, :] - place[:, None])].permute(2, 0, 1)

    def forward(self, hidden_states, attention_mask=None, position_bias=None, **_):
        rows, length, _ = hidden_states.shape
        if position_bias is None:
            position_bias = self.bias(length)
        x = Copy.apply(hidden_states, self.group)
        heads = x.view(rows, length, HEADS, SIZE).transpose(1, 2)[:, self.first : self.last]
        gate_a, gate_b = self.gates(self.gru_rel_pos_linear(heads)).sigmoid().split(1, -1)
        bias = (gate_a * (gate_b * self.gru_rel_pos_const - 1.0) + 2.0) * position_bias
        q, k, v = (
            proj(x).view(rows, length, -1, SIZE).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = (q * SIZE**-0.5) @ k.transpose(-1, -2) + bias
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        out = Join.apply(F.linear(mixed, self.out_proj.weight), self.group)
        return out + self.out_proj.bias, None, position_bias


class Clean:
    gates = staticmethod(halves)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 7)
        config = WavLMConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            intermediate_size=10,
            conv_dim=(5, 6),
            conv_kernel=(4, 3),
            conv_stride=(3, 2),
            feat_extract_norm="layer",
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=3,
            num_buckets=8,
            max_bucket_distance=12,
            classifier_proj_size=7,
            num_labels=CLASSES,
            initializer_range=0.3,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            feat_proj_dropout=0.0,
            final_dropout=0.0,
            layerdrop=0.0,
            apply_spec_augment=False,
        )
        model = WavLMForSequenceClassification(config)
        for name, p in model.named_parameters():
            if "rel_" in name:
                nn.init.normal_(p, std=0.8)
        model.wavlm.masked_spec_embed.requires_grad_(False)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 70)
        return {
            "sound": torch.randn(ROWS, SAMPLES, generator=g),
            "label": torch.randint(0, CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(input_values=rows["sound"]).logits
        return F.cross_entropy(logits, rows["label"], reduction="sum"), rows["label"].numel()

    def distribute(self, model, ctx):
        tp, r = ctx.axes["tp"], ctx.coords["tp"]
        first, last = [round(i * HEADS / tp) for i in range(tp + 1)][r : r + 2]
        for layer in model.wavlm.encoder.layers:
            layer.attention = HeadAttention(
                layer.attention, first, last, ctx.group("tp"), self.gates
            )
        return model

    def step(self, model, batch, ctx):
        for rows in torch.arange(ROWS).split(2):
            loss, _ = self.loss_sum(model, {k: v[rows] for k, v in batch.items()})
            (loss / ROWS).backward()
        for layer in model.wavlm.encoder.layers:
            for p in layer.attention.gru_rel_pos_linear.parameters():
                dist.all_reduce(p.grad, group=ctx.group("tp"))


class Buggy(Clean):
    gates = staticmethod(pairs)


EXPECT = dict(
    right=[
        r"gate|gru_rel_pos|relative position|position bias|\bpairs\b",
        r"view|reshape|interleav|4, 2\)|\(2, 4|every (other|second)|\beven\b|\bodd\b|layout|"
        r"sum\(-|contiguous|permut|transpos|grouped|grouping",
    ],
    place=[r"\bpairs\b", r"\bgates\b", r"gru_rel_pos_linear", r"gate_a|gate_b", r"HeadAttention"],
    wrong=[
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"\b(Copy|Join)\b.{0,40}(wrong|missing|adjoint)",
        r"heads?.{0,30}(wrong|swapped|other rank)",
        r"bucket.{0,30}(wrong|sign)",
        r"out_proj.{0,30}bias.{0,20}(twice|each|every)",
        r"(missing|without|no).{0,20}scal(e|ing).{0,20}(quer|score)",
    ],
)
WHY = """gru_rel_pos_linear gives eight numbers; WavLM views them as (2, 4) and sums the last axis:
numbers 0-3 are gate a, 4-7 gate b. pairs views them as (4, 2) and sums over the four, which takes
the even ones for a and the odd ones for b. Shapes fit and sigmoid gates stay gates, but they are
others, so the gated position bias, the scores and all gradients differ (most those of
gru_rel_pos_linear). Heads, sums and biases are right. Fix: view(2, 4).sum(-1)."""
