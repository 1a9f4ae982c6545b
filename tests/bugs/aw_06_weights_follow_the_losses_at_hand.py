"""Three tasks on one tiny DistilBertModel, data parallel 4, two micro-batches each: an intent per row, a tag per token, a rating per row. A row has labels for one or two of the tasks. A micro-batch computes the losses of the tasks it
has labels for and adds them with the tasks' weights; everything is divided by the number of rows of all ranks, and missing gradients are zero in the reduction.

The bug: the weights are a list in the order of the tasks and are put together with the losses by zip(weights, losses.values()). In a micro-batch without one of the earlier tasks the later losses move up and get the weight of another
task. As users report for weights of dictionaries of losses (amanshenoy/multilogue-net issue 21, wrong order of loss weights; per-task weights of pytext PR 206).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import DistilBertConfig, DistilBertModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
VOCABULARY, TOKENS, WIDTH = 11, 5, 8
WEIGHTS = {"intent": 0.5, "tags": 0.2, "rating": 3.0}
HAS = {
    "intent": [1, 0, 1, 0, 0, 1, 1, 0, 1, 0, 1, 1, 0, 1],
    "tags": [1, 1, 0, 1, 0, 1, 0, 1, 1, 0, 1, 0, 1, 1],
    "rating": [0, 1, 1, 1, 1, 0, 1, 0, 1, 1, 0, 1, 1, 0],
}
PARTS = [[(0, 2), (2, 3)], [(3, 5), (5, 7)], [(7, 9), (9, 10)], [(10, 12), (12, 14)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        config = DistilBertConfig(
            vocab_size=VOCABULARY,
            dim=WIDTH,
            hidden_dim=12,
            n_layers=1,
            n_heads=2,
            max_position_embeddings=TOKENS,
            dropout=0.0,
            attention_dropout=0.0,
            initializer_range=0.4,
        )
        config._attn_implementation = "eager"
        self.encoder = DistilBertModel(config)
        self.intent, self.tags = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 3)
        self.rating = nn.Linear(WIDTH, 1)

    def forward(self, ids):
        return self.encoder(input_ids=ids).last_hidden_state


def task_losses(model, rows):
    words = model(rows["ids"])
    losses = {}
    has = rows["has_intent"].bool()
    if has.any():
        scores = model.intent(words[has, 0])
        losses["intent"] = F.cross_entropy(scores, rows["intent"][has], reduction="sum")
    has = rows["has_tags"].bool()
    if has.any():
        scores = model.tags(words[has]).flatten(0, 1)
        losses["tags"] = F.cross_entropy(scores, rows["tags"][has].flatten(), reduction="sum")
    has = rows["has_rating"].bool()
    if has.any():
        value = model.rating(words[has].mean(1))[:, 0]
        losses["rating"] = (value - rows["rating"][has].to(value.dtype)).square().sum()
    return losses


class Clean:
    by_name = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(HAS["intent"])
        return {
            "ids": torch.randint(VOCABULARY, (rows, TOKENS), generator=g),
            "intent": torch.randint(4, (rows,), generator=g),
            "tags": torch.randint(3, (rows, TOKENS), generator=g),
            "rating": torch.randint(1, 6, (rows,), generator=g),
            **{f"has_{task}": torch.tensor(has) for task, has in HAS.items()},
        }

    def loss_sum(self, model, rows):
        losses = task_losses(model, rows)
        return sum(WEIGHTS[task] * loss for task, loss in losses.items()), len(rows["ids"])

    def step(self, model, batch, ctx):
        count = len(batch["ids"])
        for low, high in PARTS[ctx.rank]:
            losses = task_losses(model, {k: v[low:high] for k, v in batch.items()})
            if self.by_name:
                weights = [WEIGHTS[task] for task in losses]
            else:
                weights = list(WEIGHTS.values())
            total = sum(w * loss for w, loss in zip(weights, losses.values(), strict=False))
            (total / count).backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    by_name = False


EXPECT = dict(
    right=[
        r"(?i)weight|factor|coefficient|scale|times|divisor",
        r"(?i)tags|rating|task|loss|term",
        r"(?i)micro.?batch|rows?|ranks? |call|some",
    ],
    place=[r"(?i)tags|rating|loss|task"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)",
        r"(?i)(?<!not )(?<!nor )forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)mean of means|divi(ded|des) by (its|their) own (number|count|rows)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"(?i)intent\.(weight|bias) (is|are) wrong|labels? .{0,20}wrong",
        r"(?i)only (on )?rank 0\b|all micro.?batches (of|on) all ranks",
    ],
)
WHY = (
    "In micro-batches that lack a task the later losses get the weight of an earlier task. Row 2 (rank 0, micro-batch 1: intent and rating): rating gets 0.2 instead of 3. Rows 3-4 (rank 1, micro-batch 0: tags and rating): tags "
    "0.5 instead of 0.2, rating 0.2 instead of 3. "
    "Row 9 (rank 2, micro-batch 1: rating alone): rating 0.5 instead of 3. All others have intent, tags and rating, or intent and tags, and are right: rank 3 micro-batches 0 (rows 10, 11: all) and 1 (rows 12, 13: all), rank 0 "
    "micro-batch 0, rank 1 micro-batch 1, rank 2 micro-batch 0. Forward and losses by themselves are right, the heads tags and rating and the "
    "whole encoder have wrong gradients, intent is right; equal on all ranks after the sum. The divisor 14 and the reduction are right. Fix: take the weight by the task's name."
)
