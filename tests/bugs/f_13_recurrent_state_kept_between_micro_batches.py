"""GRU layers in a pipeline (torch.distributed.pipelining, GPipe); each stage reads a sequence in windows and hands its state from
window to window. After FAULTS C15-06/C15-07 (state mutated in the forward) and the usual stateful-RNN bug: the state is
cleared once per step, and so goes on from one micro-batch into the next.
"""

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, LENGTH, WINDOW, WIDTH, VOCAB, MICRO_BATCHES = 9, 7, 4, 6, 12, 3


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gru = nn.LayerNorm(WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.state, self.clear = None, True

    def forward(self, x):
        state, out = None if self.clear else self.state, []
        for window in self.norm(x).split(WINDOW, dim=1):
            y, state = self.gru(window, state)
            out.append(y)
        self.state = state.detach()
        return x + torch.cat(out, dim=1)


class Clean:
    clear = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        last = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))
        return nn.Sequential(
            nn.Sequential(nn.Embedding(VOCAB, WIDTH), Recurrent()), Recurrent(), last
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        loss = self.token_loss(model(rows["ids"]), rows["labels"])
        return loss, (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        part = model[ctx.rank]
        for module in part.modules():
            if isinstance(module, Recurrent):
                module.clear = self.clear
        self.stage = PipelineStage(part, ctx.rank, ctx.world_size, ctx.device, *self.example(ctx))
        return nn.ModuleDict({str(ctx.rank): part})

    @staticmethod
    def example(ctx):
        """What goes in and out, so that no trial run is made."""
        rows = ROWS // MICRO_BATCHES
        ids, x, logits = (
            torch.zeros(rows, LENGTH, dtype=torch.long),
            torch.zeros(rows, LENGTH, WIDTH, dtype=ctx.dtype).requires_grad_(),
            torch.zeros(rows, LENGTH, VOCAB, dtype=ctx.dtype).requires_grad_(),
        )
        return ((ids, x), (x, x), (x, logits))[ctx.rank]

    def step(self, model, batch, ctx):
        for module in model.modules():
            if isinstance(module, Recurrent):
                module.state = None
        count = (batch["labels"] != -100).sum()
        schedule = ScheduleGPipe(
            self.stage,
            MICRO_BATCHES,
            loss_fn=lambda logits, labels: self.token_loss(logits, labels) / count,
            scale_grads=False,
        )
        x = [batch["ids"]] if ctx.rank == 0 else []
        target = {"target": batch["labels"]} if ctx.rank == ctx.world_size - 1 else {}
        schedule.step(*x, **target)


class Buggy(Clean):
    clear = False


EXPECT = dict(
    right=[
        r"gru|recurrent|state|hidden|\b0\.1\b|stage",
        r"forward|output|activation|state|micro-?batch|carried|previous|not (cleared|reset)|stale|rows|hidden|values?",
    ],
    place=[r"gru", r"micro-?batch", r"\b0\.1\b|\b1\.gru|stage", r"ranks? \W?[012]", r"rows"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (right|exact|correct)$",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
        r"(embedding|0\.0)\S* .{0,20}first wrong",
        r"divided by",
    ],
)
WHY = (
    "The GRUs of stages 0 and 1 begin the second and third micro-batch (rows 3-8) with the last state of the micro-batch before it instead of zeros; only the first micro-batch is right. "
    "The forward is wrong from 0.1.gru on for these rows, and with it the gradients of all parameters."
)
