"""A BERT classifier of transformers under FSDP2 on three ranks, each encoder layer a group of its own, the rest in the root's. Two micro-batches, the second one reduces; the loss is the sum over the own rows
times world size over the global number of rows, as FSDP averages.

The bug: parameters of one dimension (biases, norms) are handed to fully_shard as ignored_params, "too small to shard", in the belief that FSDP treats them as replicated. It does not touch them at all: nobody
reduces their gradients. After the many reports about ignored_modules/ignored_params of FSDP (replicated in memory, but not synchronised).
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WORDS, LABELS, ACCUMULATION = 8, 5, 17, 3, 2


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = BertConfig(
            vocab_size=WORDS,
            hidden_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=15,
            max_position_embeddings=LENGTH,
            type_vocab_size=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=LABELS,
            initializer_range=0.3,
            attn_implementation="eager",
        )
        return BertForSequenceClassification(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "input_ids": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
            "attention_mask": (torch.arange(LENGTH) < lengths).long(),
            "labels": torch.randint(LABELS, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["input_ids"], attention_mask=rows["attention_mask"]).logits
        return F.cross_entropy(logits, rows["labels"], reduction="sum"), len(logits)

    def distribute(self, model, ctx):
        for layer in model.bert.encoder.layer:
            fully_shard(layer, mesh=ctx.mesh)
        return fully_shard(model, mesh=ctx.mesh)

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = torch.tensor(len(mine["labels"]))
        dist.all_reduce(count)
        for n in range(ACCUMULATION):
            part = {k: v.tensor_split(ACCUMULATION)[n] for k, v in mine.items()}
            model.set_requires_gradient_sync(n == ACCUMULATION - 1)
            loss, _ = self.loss_sum(model, part)
            (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    def distribute(self, model, ctx):
        replicated = {p for p in model.parameters() if p.ndim == 1}
        for layer in model.bert.encoder.layer:
            fully_shard(layer, mesh=ctx.mesh, ignored_params=replicated)
        return fully_shard(model, mesh=ctx.mesh, ignored_params=replicated)


EXPECT = dict(
    right=[
        r"ignored?|bias|norm|one.?dimension|1.?d\b|ndim|replicated|not (sharded|managed|wrapped|part of)|parameters?|outside",
        r"(not|never|no(body| rank| collective| reduc\w*)?|nothing|missing|without|lacks?|unsynchroni[sz]ed|un-?reduced).{0,60}(reduc|sync|summed|averaged|sum\b|average|exchang|all.?reduce|communicat)|own rows|own gradient|local (gradient|rows)|(reduc|sync|sum\b|average|all.?reduce).{0,40}(missing|left out|absent|skipped|never|not )|unreduced|unsynchroni|its own (share|part|contribution)",
    ],
    place=[r"ignored_params", r"distribute|fully_shard", r"bias|LayerNorm"],
    wrong=[
        r"all parameters .{0,30}(not|never)|embeddings?\.weight.{0,40}not reduced",
        r"reduced (twice|again)|counted (twice|two times)|own (token )?count|mean of means",
        r"only (in|of|for) the (first|second|last) micro.?batch|micro.?batch(es)? .{0,30}(lost|dropped|overwritten)",
        r"wrong group|(wrong|other|same) rows",
    ],
)
WHY = (
    "fully_shard leaves ignored_params alone: they stay plain tensors that are neither sharded nor reduced. So the gradient of each bias and norm parameter is on every rank that of its own rows (times three, as the "
    "loss is scaled for FSDP's average), over both micro-batches, and differs between the three ranks; all matrices and embeddings are sharded and right. A right cause says that the gradients of these parameters "
    "(biases, LayerNorms: the ignored ones) are never reduced over dp. Fix: do not ignore them, or all-reduce and average their gradients after the last micro-batch."
)
