"""torch.distributed.pipelining with a loss that is already divided by the global token count.
After torchtitan reports: the schedule divides by its micro-batches on top (scale_grads)."""

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2}}}}
ROWS, LENGTH, WIDTH, VOCAB, MICRO = 9, 4, 8, 12, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.ffn = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.ffn(self.norm(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class Clean:
    scale_grads = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=g)
        valid = torch.arange(LENGTH) < lengths
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(~valid, -100)}

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.token_loss(model(rows["ids"]), rows["labels"]), (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        layers = list(model.layers)
        if ctx.coords["pp"] == 0:
            return nn.Sequential(model.tok_embeddings, *layers[:2])
        return nn.Sequential(*layers[2:], model.norm, model.output)

    def step(self, model, batch, ctx):
        count = (batch["labels"] != -100).sum()

        def loss_of(logits, labels):
            return self.token_loss(logits, labels) / count

        stage = PipelineStage(model, ctx.coords["pp"], ctx.axes["pp"], ctx.device)
        schedule = Schedule1F1B(stage, MICRO, loss_fn=loss_of, scale_grads=self.scale_grads)
        if ctx.coords["pp"] == 0:
            schedule.step(batch["ids"])
        else:
            schedule.step(target=batch["labels"])


class Buggy(Clean):
    scale_grads = True


EXPECT = dict(
    right=[r"micro.?batch|1/3|0\.333|too small|divided.*3|factor.*3|3 times"],
    place=[
        r"micro.?batch",
        r"all (parameters|gradients|stages)|every (parameter|gradient|stage)",
        r"\bpp\b|stage",
        r"scale_grads|schedule",
    ],
    wrong=[
        r"never reduced|not reduced|missing reduction",
        r"\bforward (is )?wrong",
        r"counted twice",
    ],
)
WHY = (
    "The schedule divides all gradients by its 3 micro-batches, though the loss is already divided "
    "by the count of the whole batch: every gradient is a third."
)
