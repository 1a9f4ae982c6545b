"""A pipeline of three stages by hand, one-forward-one-backward, five micro-batches, sends and receives without waiting. After reports on
hand-written 1F1B schedules: which saved micro-batch a gradient that comes back belongs to.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, LENGTH, WIDTH, VOCAB, MICRO = 10, 5, 11, 13, 5


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.over = nn.LayerNorm(WIDTH), nn.Linear(LENGTH, LENGTH)
        self.up, self.down = nn.Linear(WIDTH, 18), nn.Linear(18, WIDTH)

    def forward(self, x):
        x = x + self.over(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(
            [
                nn.Sequential(nn.Embedding(VOCAB, WIDTH), Mixer()),
                nn.Sequential(Mixer(), Mixer()),
                nn.Sequential(Mixer(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)),
            ]
        )

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x


def token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        labels = torch.randint(VOCAB, (ROWS, LENGTH), generator=g)
        drop = torch.rand(ROWS, LENGTH, generator=g) < 0.3
        return {
            "tokens": torch.randint(VOCAB, (ROWS, LENGTH), generator=g),
            "labels": labels.masked_fill(drop, -1),
        }

    def loss_sum(self, model, rows):
        return token_loss(model(rows["tokens"]), rows["labels"]), (rows["labels"] >= 0).sum()

    def distribute(self, model, ctx):
        for i in range(len(model.stages)):
            if i != ctx.coords["pp"]:
                model.stages[i] = nn.Identity()
        return model

    def take(self, saved):
        return saved.pop(0)

    def step(self, model, batch, ctx):
        n, me, group = ctx.axes["pp"], ctx.coords["pp"], ctx.group("pp")
        stage, first, last = model.stages[me], me == 0, me == n - 1
        tokens, labels = batch["tokens"].chunk(MICRO), batch["labels"].chunk(MICRO)
        count = (batch["labels"] >= 0).sum()
        shape = (*tokens[0].shape, WIDTH)
        saved, sends = [], []

        def send(x, to):
            x = x.detach().contiguous()
            sends.append((dist.isend(x, dist.get_global_rank(group, to), group=group), x))

        def receive(source):
            x = torch.empty(shape, dtype=ctx.dtype)
            dist.recv(x, dist.get_global_rank(group, source), group=group)
            return x

        def forward(i):
            x = tokens[i] if first else receive(me - 1).requires_grad_()
            y = stage(x)
            if last:
                y = token_loss(y, labels[i]) / count
            else:
                send(y, me + 1)
            saved.append((x, y))

        def backward():
            x, y = self.take(saved)
            y.backward(None if last else receive(me + 1))
            if not first:
                send(x.grad, me - 1)

        warm = n - 1 - me
        for i in range(warm):
            forward(i)
        for i in range(warm, MICRO):
            forward(i)
            backward()
        for _ in range(warm):
            backward()
        for work, _ in sends:
            work.wait()


class Buggy(Clean):
    def take(self, saved):
        return saved.pop()


EXPECT = dict(
    right=[
        r"backward|gradient",
        r"stages\.1|stages\.0|ranks? (0|1)|micro|send|recv|order|stage",
        r"micro|order|another|other|between|reaches|belong|call|recv|send|wrong",
    ],
    place=[r"stages\.1|stages\.0|ranks? (0|1)|recv|send|between"],
    wrong=[
        r"forward (is|goes|was) wrong|goes wrong in the forward",
        r"missing (all.?)?reduc|(never|not) (been )?all.?reduced",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"backward of \S*stages\.2\S* is wrong",
        r"divides? by (its|their) own",
    ],
)
WHY = (
    "The last stage runs the backward of each micro-batch at once and sends gradients in the order 0, 1, 2, 3, 4. The stages before take the newest "
    "saved micro-batch instead of the oldest: stage 1 puts the gradient of 0 into 1, of 1 into 2, of 2 into 3, of 3 into 4 and of 4 into 0, and stage 0 "
    "mixes them again. The forward, the loss and stage 2's gradients are right; those of stages 0 and 1 (ranks 0 and 1) are wrong, but for stages.1.1.down.bias."
)
