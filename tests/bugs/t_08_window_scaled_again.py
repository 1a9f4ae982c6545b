"""torch.distributed.pipelining over three stages with GPipe: an optimizer step of two calls of schedule.step, three micro-batches each, masked labels.
After the reports on scale_grads of the pipelining schedules and gradient accumulation outside of them.
"""

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, LENGTH, WIDTH, VOCAB, CALLS, MICRO = 12, 5, 9, 13, 2, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.over = nn.LayerNorm(WIDTH), nn.Linear(LENGTH, LENGTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        x = x + self.over(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(4)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        if self.head is not None:
            x = self.head(self.norm(x))
        return x


def token_loss(logits, labels):
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


class Clean:
    scale_grads = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        labels = torch.randint(VOCAB, (ROWS, LENGTH), generator=g)
        labels[torch.rand(ROWS, LENGTH, generator=g) < 0.35] = -100
        labels[:, -1] = 2
        return {"tokens": torch.randint(VOCAB, (ROWS, LENGTH), generator=g), "labels": labels}

    def loss_sum(self, model, rows):
        return token_loss(model(rows["tokens"]), rows["labels"]), (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        stage, last = ctx.coords["pp"], ctx.axes["pp"] - 1
        mine = [("0",), ("1", "2"), ("3",)][stage]
        for name in list(model.blocks):
            if name not in mine:
                del model.blocks[name]
        if stage != 0:
            model.embed = None
        if stage != last:
            model.norm = model.head = None
        return model

    def step(self, model, batch, ctx):
        index, stages = ctx.coords["pp"], ctx.axes["pp"]
        stage = PipelineStage(model, index, stages, torch.device(ctx.device), group=ctx.group("pp"))
        factor = (MICRO if self.scale_grads else 1) / (batch["labels"] != -100).sum().item()
        schedule = ScheduleGPipe(
            stage,
            MICRO,
            loss_fn=lambda y, labels: token_loss(y, labels) * factor,
            scale_grads=self.scale_grads,
        )
        for tokens, labels in zip(
            batch["tokens"].chunk(CALLS), batch["labels"].chunk(CALLS), strict=True
        ):
            if index == 0:
                schedule.step(tokens)
            elif index == stages - 1:
                schedule.step(target=labels)
            else:
                schedule.step()


class Buggy(Clean):
    scale_grads = True


EXPECT = dict(
    right=[
        r"rows?|micro.?batch|first (call|half|window|step)|backward|accumulat|calls?\b|earlier",
        r"1/3|0\.33|divid|scale|factor|too small|weigh",
    ],
    place=[
        r"scale_grads|schedule|micro.?batch|accumulat|rows?|backward|first (call|half|window)|step"
    ],
    wrong=[
        r"forward (is|goes|was) wrong|goes wrong in the forward",
        r"(is|are|was|were) (never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"do(es)? not read every row once|rows? .{0,20}(never|twice) read",
        r"tokens? (is|are) lost",
        r"(counted|reduced|summed) (twice|again)",
        r"divid\w+ by (its|their) own (count|number)",
        r"backward of \S*(embed|blocks|norm|head|over|up|down)\S* is wrong",
        r"gradient of other targets",
    ],
)
WHY = (
    "The loss is multiplied by the 3 micro-batches because the schedule divides by them (scale_grads=True), but it divides all that is in .grad at the end of every schedule.step, so at the end of the second call "
    "what the first one has left is divided by 3 again: rows 0 to 5 count 1/3, rows 6 to 11 are right. On every stage, in every parameter alike; forwards, losses and backwards are right. "
    "Right: scale_grads=False with the loss divided by all valid tokens, or one division after the last call."
)
