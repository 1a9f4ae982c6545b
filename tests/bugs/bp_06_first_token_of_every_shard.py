"""A BERT classifier (transformers) under sequence parallelism: the eight tokens are cut over three ranks (3, 3, 2), each rank embeds its own tokens at their positions, keys and values are gathered in every layer, and pooler and
classifier work on the [CLS] token. All ranks compute the same loss from it, each a third. Rows are padded on the right. Two micro-batches, gradients summed over the ranks.

The bug: the pooler gets hidden_states[:, 0] of the rank's shard, as in the code for one process. That is [CLS] on the first rank, and some token in the middle (or padding) on the others. After Ulysses / sequence parallel fine-tuning of
encoders and reward models whose pooling is left as it was ("pooled output is taken from local sequence").
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
ROWS, LENGTH, HEADS, CLASSES = 5, 8, 2, 3


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(fctx, own, lo, group):
        fctx.place, fctx.group = (lo, lo + own.shape[1]), group
        full = own.new_zeros(own.shape[0], LENGTH, *own.shape[2:])
        full[:, lo : lo + own.shape[1]] = own
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=fctx.group)
        return grad[:, slice(*fctx.place)], None, None


class SumOverSequenceRanks(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = BertConfig(
            vocab_size=19,
            hidden_size=12,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            intermediate_size=20,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=CLASSES,
            initializer_range=0.3,
        )
        config._attn_implementation = "eager"
        return BertForSequenceClassification(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(4, LENGTH + 1, (ROWS, 1), generator=g)
        mask = (torch.arange(LENGTH) < lengths).long()
        return {
            "input_ids": torch.randint(1, 19, (ROWS, LENGTH), generator=g) * mask,
            "attention_mask": mask,
            "labels": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["input_ids"], attention_mask=rows["attention_mask"]).logits
        return F.cross_entropy(logits, rows["labels"], reduction="sum"), len(logits)

    def attention(self, layer, h, mask, lo, group):
        inner = layer.attention.self
        q, k, v = inner.query(h), inner.key(h), inner.value(h)
        k, v = (GatherSequence.apply(t, lo, group) for t in (k, v))
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(mask[:, None, None] == 0, float("-inf"))
        context = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
        return layer.attention.output(context, h)

    def pooled(self, bert, h, ctx):
        first = h[:, :1] if ctx.coords["sp"] == 0 else h[:, :1] * 0
        return bert.pooler(SumOverSequenceRanks.apply(first, ctx.group("sp")))

    def shard_loss(self, model, part, ctx):
        own = torch.arange(LENGTH).tensor_split(ctx.axes["sp"])[ctx.coords["sp"]]
        ids = part["input_ids"][:, own]
        h = model.bert.embeddings(input_ids=ids, position_ids=own[None])
        for layer in model.bert.encoder.layer:
            h = self.attention(layer, h, part["attention_mask"], int(own[0]), ctx.group("sp"))
            h = layer.output(layer.intermediate(h), h)
        logits = model.classifier(self.pooled(model.bert, h, ctx))
        return F.cross_entropy(logits, part["labels"], reduction="sum") / ctx.axes["sp"]

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in batch.items()}
            (self.shard_loss(model, part, ctx) / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("sp"))


class Buggy(Clean):
    def pooled(self, bert, h, ctx):
        return bert.pooler(h)


EXPECT = dict(
    right=[
        r"pool|cls|first (token|position|column|element)|h\[:, ?0|\[:, ?:?[01]\]|summary|classification token|token (0|zero)|position 0",
        r"own|local|shard|(each|every|other) ranks?|rank.{0,20}(0|zero|first)|not (shared|summed|sent|broadcast|exchanged)|broadcast|SumOverSequenceRanks",
    ],
    place=[r"pooled|pooler", r"SumOverSequenceRanks", r"shard_loss|classifier|logits"],
    wrong=[
        r"parameters?.{0,30}(not|never) reduced|reduced twice|missing all.?reduce of",
        r"divisor|mean of means|own count|position_ids|position embedding.{0,20}wrong",
        r"attention mask|keys? and values?.{0,30}(not gathered|wrong)|GatherSequence.{0,40}(wrong|missing)",
        r"only the last micro.?batch",
    ],
)
WHY = (
    "hidden_states[:, 0] of a shard is [CLS] on the rank 0 alone; on ranks 1 and 2 it is token 3 and token 6 (padding in some rows). Each rank computes a third of the loss from its own pooled token, so two thirds of the loss are those of the wrong tokens, "
    "and the gradients of all parameters are wrong after the sum, in both micro-batches. Encoder, gathers and final reduction are right. A right cause says that pooler/classifier see the own shard's first token (or that the [CLS] state of rank 0 isn't given to the "
    "others). Fix: take token 0 from its owner (a sum/broadcast whose backward goes to rank 0)."
)
