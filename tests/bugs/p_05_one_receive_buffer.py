"""A pipeline of three stages with point-to-point calls by hand: all forwards, then all backwards, of four micro-batches. After reports on
preallocated receive buffers of pipelines: activations are received into one buffer for all micro-batches, which the saved tensors of the
earlier ones still point to.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH, MICRO = 8, 5, 18, 10, 4


class Stage(nn.Module):
    def __init__(self, first=False, last=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH) if first else None
        self.mix = nn.Linear(WIDTH, 15)
        self.back = nn.Linear(15, WIDTH)
        self.along = nn.Conv1d(WIDTH, WIDTH, 3)
        self.head = nn.Linear(WIDTH, VOCAB) if last else None

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        x = self.back(torch.tanh(self.mix(x))) + x
        x = x + torch.tanh(self.along(F.pad(x.transpose(1, 2), (2, 0)))).transpose(1, 2)
        return x if self.head is None else self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return nn.Sequential(Stage(first=True), Stage(), Stage(last=True))

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    @staticmethod
    def loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.loss(model(rows["ids"]), rows["labels"]), rows["labels"].numel()

    def distribute(self, model, ctx):
        for i in range(3):
            if i != ctx.coords["pp"]:
                model[i] = None
        return model

    def buffers(self, like):
        """What the micro-batches' activations are received into."""
        return [torch.empty_like(like) for _ in range(MICRO)]

    def step(self, model, batch, ctx):
        me, group = ctx.coords["pp"], ctx.group("pp")
        ranks = dist.get_process_group_ranks(group)
        stage, count = model[me], batch["labels"].numel()
        inputs, outputs = [], []
        shape = torch.empty(ROWS // MICRO, LENGTH, WIDTH, dtype=ctx.dtype)
        into = self.buffers(shape)
        for m, ids in enumerate(batch["ids"].chunk(MICRO)):
            x = ids
            if me > 0:
                dist.recv(into[m], ranks[me - 1], group=group)
                x = into[m].data.requires_grad_()
            y = stage(x)
            if me < 2:
                dist.send(y.detach().contiguous(), ranks[me + 1], group=group)
            inputs.append(x)
            outputs.append(y)
        for m, labels in enumerate(batch["labels"].chunk(MICRO)):
            if me == 2:
                (self.loss(outputs[m], labels) / count).backward()
            else:
                grad = torch.empty_like(shape)
                dist.recv(grad, ranks[me + 1], group=group)
                outputs[m].backward(grad)
            if me > 0:
                dist.send(inputs[m].grad, ranks[me - 1], group=group)


class Buggy(Clean):
    def buffers(self, like):
        return [torch.empty_like(like)] * MICRO


EXPECT = dict(
    right=[
        r"\b[12]\.mix|stage|mix",
        r"micro.?batch|backward|stale|last|overwrit|buffer|saved|other (input|activation|row)|input",
    ],
    place=[r"\b[12]\.mix|mix"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"forward .{0,40}(goes|is) wrong in",
        r"\b(0|2)\.(embed|head)\S* .{0,20}(is|are) wrong",
        r"(own|local) (count|denominator|divisor)",
    ],
)
WHY = (
    "Stages 1 and 2 receive the activations of all four micro-batches into one buffer. Each forward reads it in time and is right, but what autograd saved "
    "of the stage's input (for the weight of `mix`, the first layer) is the buffer itself, which holds micro-batch 3's activations when the backwards run: "
    "1.mix.weight and 2.mix.weight are sums of grad_m^T x_3 instead of grad_m^T x_m. All else, biases and the gradients sent back included, is right."
)
