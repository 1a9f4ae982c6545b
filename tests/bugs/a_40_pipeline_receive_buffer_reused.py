"""A hand-written pipeline that stores its stage inputs and computes activations again in the
backward. After FAULTS class C13 (receive buffers recycled too early).
"""

import torch
import torch.distributed as dist
from torch import nn
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
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


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
        stage = ctx.coords["pp"]
        parts = [model.layers[stage]]
        if stage == 0:
            parts.insert(0, model.embed)
        if stage == ctx.axes["pp"] - 1:
            parts += [model.norm, model.head]
        self.buffer = None
        return nn.Sequential(*parts)

    def step(self, model, batch, ctx):
        stage, last = ctx.coords["pp"], ctx.axes["pp"] - 1
        peers = dist.get_process_group_ranks(ctx.group("pp"))
        mine = batch
        count = (mine["labels"] != -100).sum()
        micros = [
            {k: v.chunk(MICRO_BATCHES)[i] for k, v in mine.items()} for i in range(MICRO_BATCHES)
        ]
        inputs = []
        for micro in micros:
            x = micro["ids"]
            if stage:
                x = self.receive_buffer((*x.shape, WIDTH), ctx)
                dist.recv(x, peers[stage - 1])
            inputs.append(x)
            if stage < last:
                with torch.no_grad():  # activations are computed again in the backward
                    dist.send(model(x), peers[stage + 1])
        for x, micro in zip(inputs, micros, strict=True):
            self.backward(model, x, micro, count, peers, ctx)

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

    def receive_buffer(self, shape, ctx):
        return torch.empty(shape, dtype=ctx.dtype)


class Buggy(Clean):
    def receive_buffer(self, shape, ctx):
        if self.buffer is None or self.buffer.shape != shape:
            self.buffer = torch.empty(shape, dtype=ctx.dtype)
        return self.buffer


EXPECT = dict(
    right=[
        r"layers\.[12]|stage|rank [12]",
        (
            r"micro.?batch|stale|recomput|buffer|forward|output|(wrong|other|same|last) (input"
            r"|rows|activation)"
        ),
    ],
    place=[r"layers\.[12]|stage|rank [12]|\bpp\b|micro"],
    wrong=[
        r"not reduced|never reduced|missing all.?reduce",
        r"mean of (the )?means",
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
        r"averag",
    ],
)

WHY = (
    "Stages 1 and 2 receive all micro-batches into one buffer, so every stored input is the "
    "last micro-batch's when it is computed again."
)
