"""A GPipe schedule by hand with send/recv: all forwards, then all backwards, micro-batch by
micro-batch. After reports on home-made schedules: a stage pops from the wrong end."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, WIDTH, CLASSES, MICRO = 8, 10, 5, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 14)
        self.down = nn.Linear(14, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, 6, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["x"])

    def distribute(self, model, ctx):
        stage, last = ctx.coords["pp"], ctx.axes["pp"] - 1
        parts = nn.ModuleDict()
        if stage == 0:
            parts["stem"] = model.stem
        parts["block"] = model.blocks[stage]
        if stage == last:
            parts["head"] = model.head
        return parts

    def take(self, saved):
        """The oldest micro-batch that has no backward yet."""
        return saved.pop(0)

    def step(self, model, batch, ctx):
        stage, last = ctx.coords["pp"], ctx.axes["pp"] - 1
        micro = {k: v.chunk(MICRO) for k, v in batch.items()}
        saved = []
        for m in range(MICRO):
            if stage == 0:
                x = micro["x"][m]
            else:
                x = torch.empty(len(micro["x"][m]), WIDTH, dtype=ctx.dtype)
                dist.recv(x, ctx.rank - 1)
                x.requires_grad_()
            out = x
            for part in model.values():
                out = part(out)
            if stage == last:
                out = F.cross_entropy(out, micro["y"][m], reduction="sum") / ROWS
            else:
                dist.send(out.detach(), ctx.rank + 1)
            saved.append((x, out))
        for _ in range(MICRO):
            if stage == last:
                x, out = saved.pop(0)
                out.backward()
            else:
                x, out = self.take(saved)
                grad = torch.empty_like(out)
                dist.recv(grad, ctx.rank + 1)
                out.backward(grad)
            if stage > 0:
                dist.send(x.grad, ctx.rank - 1)


class Buggy(Clean):
    def take(self, saved):
        return saved.pop()


EXPECT = dict(
    right=[
        r"micro.?batch|rows?|exchang|swap|permut|mixed|other (rows|micro)|order|wrong gradient"
        r"|gradient (that|it) (arrives|receives|got)|output gradient|backward",
        r"stage|ranks? [01]|stem|blocks\.[01]|send|recv|pp",
    ],
    place=[r"ranks? [01]", r"stem|blocks\.[01]", r"send|recv", r"\bpp\b", r"stage"],
    wrong=[r"averag", r"counted (twice|\d times)", r"\bforward (is )?wrong"],
)
WHY = (
    "The last stage sends gradients first-in-first-out, the stages before pop the newest saved "
    "activation: stages 0 and 1 pair micro-batch m's gradient with micro-batch 3 - m."
)
