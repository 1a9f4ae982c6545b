"""A bidirectional pipeline of four stages: even micro-batches go down (stage s on rank s), odd ones up (stage s on rank 3 - s), so every
stage lies on two ranks, whose gradients are summed. After Chimera and DeepSeek's DualPipe (the two copies of a stage's parameters) and
FAULTS C16 (which rank holds what): the pairs of ranks are built as two halves.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 4}}}}
ROWS, WIDTH, STAGES, MICRO_BATCHES = 13, 6, 4, 4


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.gain = nn.Parameter(0.5 + torch.rand(WIDTH))

    def forward(self, x):
        return x + self.gain * self.down(F.elu(self.up(self.norm(x))))


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleDict({str(i): Stage() for i in range(STAGES)})

    def forward(self, x):
        for stage in self.stages.values():
            x = stage(x)
        return x


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Flow()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "start": torch.randn(ROWS, WIDTH, generator=g),
            "end": torch.randn(ROWS, WIDTH, generator=g),
            "weight": 0.3 + torch.rand(ROWS, generator=g),
        }

    @staticmethod
    def end_loss(guess, rows):
        return (
            F.smooth_l1_loss(guess, rows["end"], reduction="none").sum(-1) * rows["weight"]
        ).sum()

    def loss_sum(self, model, rows):
        return self.end_loss(model(rows["start"]), rows), len(rows["end"])

    def pairs(self, ranks):
        return [(r, ranks - 1 - r) for r in range(ranks // 2)]

    def distribute(self, model, ctx):
        for pair in self.pairs(ctx.axes["pp"]):
            group = dist.new_group(list(pair))
            if ctx.rank in pair:
                self.pair = group
        for i in set(range(STAGES)) - {ctx.rank, STAGES - 1 - ctx.rank}:
            del model.stages[str(i)]
        return model

    def step(self, model, batch, ctx):
        micros = [
            {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in batch.items()}
            for i in range(MICRO_BATCHES)
        ]

        def receive(rows, source):
            x = torch.empty(len(rows["end"]), WIDTH, dtype=ctx.dtype)
            dist.recv(x, source)
            return x

        held = []
        for i, rows in enumerate(micros):
            way = 1 if i % 2 == 0 else -1
            stage = ctx.rank if way == 1 else STAGES - 1 - ctx.rank
            x = rows["start"] if stage == 0 else receive(rows, ctx.rank - way).requires_grad_()
            out = model.stages[str(stage)](x)
            if stage == STAGES - 1:
                out = self.end_loss(out, rows) / ROWS
            else:
                dist.send(out.detach(), ctx.rank + way)
            held.append((way, stage, x, out))
        for rows, (way, stage, x, out) in zip(micros, held):
            out.backward(None if stage == STAGES - 1 else receive(rows, ctx.rank + way))
            if stage > 0:
                dist.send(x.grad, ctx.rank - way)
        for param in model.parameters():
            dist.all_reduce(param.grad, group=self.pair)


class Buggy(Clean):
    def pairs(self, ranks):
        return [(r, r + ranks // 2) for r in range(ranks // 2)]


EXPECT = dict(
    right=[
        r"stage",
        r"group|pair|other stage|another stage|different stage|wrong (rank|stage|group)|rank \W?[0-3].{0,80}(rank )?\W?[0-3]|mix|"
        r"partner|copies|copy|replica|even|odd|half|micro-?batch|partial|"
        r"lacks?|missing|part of the rows",
    ],
    place=[r"stages\.[0-3]", r"(all|every|each|four) ranks?|ranks? \W?[0-3]"],
    wrong=[
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"averag\w+ (instead|where)",
        r"backward of (the )?\S+ (is|was) wrong",
    ],
)
WHY = (
    "Stage s lies on ranks s and 3 - s, but the gradients are summed over ranks {0, 2} and {1, 3}, which hold different stages of "
    "equal shapes: every rank adds to its gradient of a stage (even or odd "
    "micro-batches only) the gradient of another stage. All parameters are wrong on all four ranks; forward and backward are right up "
    "to this sum."
)
