"""A 1F1B pipeline whose loss is a token sum; the trainer divides by the global valid tokens.
After FAULTS C02-07 (torchtitan issue 2972).
"""

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}

ROWS, LENGTH, VOCABULARY, WIDTH = 9, 4, 12, 8
MICRO_BATCHES = 3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=g)
        padding = torch.arange(LENGTH) >= lengths
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(padding, -100)}

    def loss_sum(self, model, rows):
        labels = rows["labels"]
        logits = model(rows["ids"]).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()

    def distribute(self, model, ctx):
        stage, last = ctx.rank, ctx.world_size - 1
        parts = [model.layers[stage]]
        if stage == 0:
            parts.insert(0, model.tok_embeddings)
        if stage == last:
            parts += [model.norm, model.output]
        part = nn.Sequential(*parts)
        self.stage = PipelineStage(part, stage, last + 1, ctx.device)
        return part

    def step(self, model, batch, ctx):
        valid_tokens = (batch["labels"] != -100).sum()
        schedule = Schedule1F1B(
            self.stage, MICRO_BATCHES, loss_fn=self.pipeline_loss(valid_tokens), scale_grads=False
        )
        losses = []
        args = [batch["ids"]] if ctx.rank == 0 else []
        if ctx.rank == ctx.world_size - 1:
            schedule.step(target=batch["labels"], losses=losses)
        else:
            schedule.step(*args)
        self.logged = sum(float(loss) for loss in losses)

    def pipeline_loss(self, valid_tokens):
        def loss_fn(logits, labels):
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            return loss / valid_tokens

        return loss_fn


class Buggy(Clean):
    def pipeline_loss(self, valid_tokens):
        def loss_fn(logits, labels):
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

        return loss_fn

    def step(self, model, batch, ctx):
        super().step(model, batch, ctx)
        self.logged /= int((batch["labels"] != -100).sum())


EXPECT = dict(
    right=[r"\b15(\.0)?\b|count|token|never divided|not divided|normali"],
    place=[
        (
            r"every (rank|parameter|gradient|stage)|all (ranks|parameters|gradients)"
            r"|each (rank|stage)|scale|factor|uniform|loss|count"
        )
    ],
    wrong=[
        r"not reduced|never reduced|missing all.?reduce",
        r"rows? .{0,30}(lost|missing|dropped)",
        r"mean of (the )?means",
    ],
)

WHY = (
    "The schedule runs backward on the raw token sum; only the logged loss is divided, so "
    "every gradient is 15 times too large."
)
