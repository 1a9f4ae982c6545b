"""A hand-written pipeline of two stages under data parallelism; the embedding is tied to the
head. After FAULTS class C11 (Megatron and DeepSpeed tied weights).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 2}}}}

ROWS, LENGTH, VOCABULARY, WIDTH = 8, 4, 13, 8
MICRO_BATCHES = 2


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
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


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
        stage, stages = ctx.coords["pp"], ctx.axes["pp"]
        parts = list(model.layers[stage * 4 // stages : (stage + 1) * 4 // stages])
        if stage == 0:
            parts.insert(0, model.embed)
        if stage == stages - 1:
            parts.append(model.head)
        return nn.Sequential(*parts)

    def step(self, model, batch, ctx):
        stage, last = ctx.coords["pp"], ctx.axes["pp"] - 1
        peers = dist.get_process_group_ranks(ctx.group("pp"))
        mine = {k: v.chunk(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        count = (mine["labels"] != -100).sum()
        dist.all_reduce(count, group=ctx.group("dp"))
        micros = [
            {k: v.chunk(MICRO_BATCHES)[i] for k, v in mine.items()} for i in range(MICRO_BATCHES)
        ]
        inputs = []
        for micro in micros:
            x = micro["ids"]
            if stage:
                x = torch.empty(*x.shape, WIDTH, dtype=ctx.dtype)
                dist.recv(x, peers[stage - 1])
            inputs.append(x)
            if stage < last:
                with torch.no_grad():  # activations are computed again in the backward
                    dist.send(model(x), peers[stage + 1])
        for x, micro in zip(inputs, micros, strict=True):
            self.backward(model, x, micro, count, peers, ctx)
        self.reduce(model, ctx)

    def backward(self, model, x, micro, count, peers, ctx):
        stage, last = ctx.coords["pp"], ctx.axes["pp"] - 1
        x = x.detach().requires_grad_() if stage else x
        out = model(x)
        if stage == last:
            labels = micro["labels"].flatten()
            (F.cross_entropy(out.flatten(0, 1), labels, reduction="sum") / count).backward()
        else:
            grad = torch.empty_like(out)
            dist.recv(grad, peers[stage + 1])
            out.backward(grad)
        if stage:
            dist.send(x.grad, peers[stage - 1])

    def reduce(self, model, ctx):
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))
        self.reduce_tied(model, ctx)

    def reduce_tied(self, model, ctx):
        tied = model[0].weight if ctx.coords["pp"] == 0 else model[-1].weight
        dist.all_reduce(tied.grad, group=ctx.group("pp"))  # of the first and the last stage


class Buggy(Clean):
    def reduce_tied(self, model, ctx):
        """Weights are tied at the start, by the same initial values."""


EXPECT = dict(
    right=[
        r"embed|head|tied",
        (
            r"not reduced|never reduced|not summed|never summed|missing.{0,40}(reduc|sum)"
            r"|unreduced|without (a |the |any )?(reduc|all.?reduce|sum)|own (part|share|rows"
            r"|contribution)|partial|no (reduc|all.?reduce|collective)|lacks? .{0,60}(rank"
            r"|part|sum|reduc)|only (its|their|the) own|(reduction|all.?reduce"
            r"|sum).{0,40}(missing|left out|skipped|absent)|stays? local|local to (each|its)"
            r"|out of the reduc|tied"
        ),
    ],
    place=[r"embed|head"],
    wrong=[
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
        r"mean of (the )?means",
        r"layers\.\d.{0,40}not reduced",
    ],
)

WHY = (
    "The first stage keeps the embedding's and the last the head's part of the tied weight's "
    "gradient; nobody sums the two."
)
