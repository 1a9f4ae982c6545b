"""T5 (transformers, small config) as a translator, attention heads cut over tp 2 (two heads and
one), rows over dp 2, two micro-batches.

q, k and v are cut by outputs, o by inputs, and the relative position table by columns, so that
each rank computes the bias of its own heads. Everything else is replicated.

The bug: the tensor parallel attention computes the buckets itself and leaves out ``bidirectional``,
whose default is True. That is right for the encoder; the decoder needs False. After tensor
parallel and fused ports of T5's compute_bias, where the static bucket function is called with
num_buckets and max_distance only.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}

ROWS, SOURCE, TARGET, WORDS, HEADS, HEAD = 7, 6, 9, 19, 3, 4


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ColumnLinear(nn.Linear):
    def forward(self, x):
        return F.linear(Enter.apply(x, self.group), self.weight)


class RowLinear(nn.Linear):
    def forward(self, x):
        return Leave.apply(F.linear(x, self.weight), self.group)


class HeadShardAttention(T5Attention):
    def buckets(self, distance):
        return self._relative_position_bucket(
            distance,
            bidirectional=not self.is_decoder,
            num_buckets=self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
        )

    def compute_bias(self, query_length, key_length, device=None, past_seen_tokens=0):
        query = torch.arange(query_length, device=device)[:, None] + past_seen_tokens
        key = torch.arange(key_length, device=device)[None, :]
        bias = F.embedding(self.buckets(key - query), self.relative_attention_bias.weight)
        return bias.permute(2, 0, 1).unsqueeze(0)


class PortedAttention(HeadShardAttention):
    def buckets(self, distance):
        return self._relative_position_bucket(
            distance,
            num_buckets=self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
        )


class Clean:
    attention_class = HeadShardAttention

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(31 + self.seed)
        config = T5Config(
            vocab_size=WORDS,
            d_model=10,
            d_kv=HEAD,
            d_ff=13,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=HEADS,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=12,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
            use_cache=False,
            attn_implementation="eager",
        )
        return T5ForConditionalGeneration(config)

    def batch(self):
        g = torch.Generator().manual_seed(32 + self.seed)
        return {
            "ids": torch.randint(2, WORDS, (ROWS, SOURCE), generator=g),
            "labels": torch.randint(2, WORDS, (ROWS, TARGET), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], labels=rows["labels"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")
        return loss, rows["labels"].numel()

    def distribute(self, model, ctx):
        group, rank, world = ctx.group("tp"), ctx.coords["tp"], ctx.axes["tp"]
        heads = torch.tensor_split(torch.arange(HEADS), world)[rank]
        lo, hi = int(heads[0]), int(heads[-1]) + 1
        for module in model.modules():
            if not isinstance(module, T5Attention):
                continue
            for linear in (module.q, module.k, module.v):
                linear.weight = nn.Parameter(linear.weight.detach()[lo * HEAD : hi * HEAD].clone())
                linear.__class__, linear.group = ColumnLinear, group
            out = module.o
            out.weight = nn.Parameter(out.weight.detach()[:, lo * HEAD : hi * HEAD].clone())
            out.__class__, out.group = RowLinear, group
            if module.has_relative_attention_bias:
                table = module.relative_attention_bias
                table.weight = nn.Parameter(table.weight.detach()[:, lo:hi].clone())
            module.n_heads = hi - lo
            module.__class__ = self.attention_class
        return model

    def step(self, model, batch, ctx):
        data = ctx.group("dp")
        mine = {k: torch.tensor_split(v, 2)[ctx.coords["dp"]] for k, v in batch.items()}
        for ids, labels in zip(*(torch.tensor_split(v, 2) for v in mine.values()), strict=True):
            loss, _ = self.loss_sum(model, {"ids": ids, "labels": labels})
            (loss / (ROWS * TARGET)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=data)


class Buggy(Clean):
    attention_class = PortedAttention


EXPECT = dict(
    right=[
        r"bucket|relative (position|attention)|position(al)? bias",
        (
            r"bidirectional|direction|causal|is_decoder|both (sides|directions)|half (of )?the|"
            r"encoder'?s? (kind|way|style|version|setting)"
        ),
        r"decoder",
    ],
    place=[
        r"PortedAttention",
        r"HeadShardAttention",
        r"_relative_position_bucket",
        r"\bbuckets\b",
        r"compute_bias",
        r"relative_attention_bias",
    ],
    wrong=[
        r"(not|never|missing|without).{0,40}(all-?)?reduc|summed (twice|again)",
        r"(wrong|other|foreign) heads?|heads? offset|columns? of the table",
        r"divis(or|ion)|normali[sz]|micro-?batch",
        r"tied|shared embedding",
    ],
)

WHY = (
    "T5's decoder spends all buckets on the past (bidirectional=False), the encoder half of them "
    "on each direction. PortedAttention.buckets leaves the argument out, so the default True is "
    "used in the decoder's self-attention too: half of the buckets stay unused and distances of "
    "two and more are merged that should have buckets of their own. The gradient of the "
    "decoder's relative_attention_bias lands on wrong rows and, as the decoder's attention "
    "changes, nearly all other gradients are off as well; the encoder's bias is computed right, "
    "and so are the cut of the heads and all sums over tp and dp. A right cause says that the "
    "decoder's relative position buckets are computed bidirectionally (as for the encoder). The "
    "fix is bidirectional=not self.is_decoder."
)
