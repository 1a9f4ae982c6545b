"""transformers' Granite (its multipliers on embedding, attention, residual and logits) under FSDP2
over three ranks; 11 packed rows sorted by length, micro-batches of two rows, the gradient synced
in the last micro-batch only. Tokens are counted over the whole batch.

Bug: the rows are dealt out in windows of ceil(11 / 3) = 4 whose start is pulled back so that the
last window is full as well: rank 2 begins at row 7 of the order, which rank 1 has too. After
loaders that keep the number of micro-batches equal so that collectives line up.
"""

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from transformers import GraniteConfig, GraniteForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, T, WORDS = 11, 8, 15


def window(order, rank, ranks):
    each = -(-len(order) // ranks)
    return order[rank * each : (rank + 1) * each]


def full_window(order, rank, ranks):
    each = -(-len(order) // ranks)
    start = min(rank * each, len(order) - each)
    return order[start : start + each]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 41)
        config = GraniteConfig(
            vocab_size=WORDS,
            hidden_size=12,
            intermediate_size=10,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=3,
            max_position_embeddings=32,
            initializer_range=0.3,
            embedding_multiplier=3.0,
            attention_multiplier=0.4,
            residual_multiplier=0.6,
            logits_scaling=1.7,
            tie_word_embeddings=False,
            use_cache=False,
        )
        return GraniteForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 410)
        ids = torch.randint(WORDS, (ROWS, T + 1), generator=g)
        lengths = torch.randint(2, T + 1, (ROWS,), generator=g)
        labels = ids[:, 1:].masked_fill(torch.arange(T) >= lengths[:, None], -100)
        return {"ids": ids[:, :-1].contiguous(), "labels": labels, "lengths": lengths}

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], use_cache=False).logits
        labels = rows["labels"].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum")
        return loss, int((labels != -100).sum())

    def own(self, order, ctx):
        return window(order, ctx.coords["dp"], ctx.axes["dp"])

    def distribute(self, model, ctx):
        for layer in model.model.layers:
            fully_shard(layer, mesh=ctx.mesh)
        fully_shard(model, mesh=ctx.mesh)
        return model

    def step(self, model, batch, ctx):
        tokens = int((batch["labels"] != -100).sum())
        order = batch["lengths"].argsort(stable=True)
        parts = self.own(order, ctx).split(2)
        for i, part in enumerate(parts):
            model.set_requires_gradient_sync(i == len(parts) - 1)
            loss, _ = self.loss_sum(model, {k: v[part] for k, v in batch.items()})
            (loss * ctx.axes["dp"] / tokens).backward()


class Buggy(Clean):
    def own(self, order, ctx):
        return full_window(order, ctx.coords["dp"], ctx.axes["dp"])


EXPECT = dict(
    right=[
        r"twice|two ranks|both ranks|overlap|2 ?(x|times)|counted (again|more than once)|"
        r"duplicat|weight 2|double|repeat|coefficient",
        r"\brows?\b|example|sample|sequence",
        r"window|rank|own|start|overlap|twice|row \d+|rows \d+",
    ],
    place=[r"full_window", r"\bown\b", r"\bstart\b", r"len\(order\) - each", r"\border\b"],
    wrong=[
        r"(row|example|sample)s?.{0,30}(left out|missing|dropped|never)",
        r"set_requires_gradient_sync.{0,40}(wrong|miss)",
        r"(token|label).{0,30}(count|normali).{0,30}(wrong|local|own)",
        r"logits_scaling.{0,30}(wrong|miss)",
        r"(averag|mean).{0,40}instead of (a )?sum",
    ],
)
WHY = """11 rows over 3 ranks in windows of 4: ranks 0 and 1 have order[0:4] and order[4:8]. For
rank 2 full_window pulls the start back to 11 - 4 = 7 to get four rows, so that order[7] is
learnt from on ranks 1 and 2: its gradient counts twice while the divisor counts its tokens once.
All other rows are right. Fix: leave the last window short (order[8:11]), or give the repeated row
the weight 0."""
