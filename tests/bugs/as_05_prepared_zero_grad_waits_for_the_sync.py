"""accelerate on three ranks, gradient accumulation over three micro-batches. Before the first micro-batch of a window a probe is taken: the gradient norm of the loss on the rank's held-out rows (mean over them), for the log, inside the
same accumulate block; then the gradients are cleared and the window begins. Sum of cross entropies of the training rows / training rows of all ranks; held-out rows do not count.

The bug: the gradients of the probe are cleared with zero_grad of the optimizer that accelerate prepared, and AcceleratedOptimizer.zero_grad does nothing while sync_gradients is false: the probe's gradients stay and are summed with the
window's. As in huggingface/accelerate issue 1299 and tatsu-lab/alpaca_farm issue 57 (zero_grad of the prepared optimizer is disabled on steps without synchronisation).
"""

import os

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
FEATURES, CLASSES, MICRO = 5, 4, 3
# rows of the micro-batches, and the held-out rows
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 6), (6, 8), (8, 9)], [(9, 12), (12, 13), (13, 15)]]
HELD = [(15, 17), (17, 18), (18, 21)]
TRAIN, ROWS = 15, 21


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 9), nn.Tanh(), nn.LayerNorm(9))
        self.head = nn.Linear(9, CLASSES)

    def forward(self, x):
        return self.head(self.body(x))


class Clean:
    by_optimizer = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FEATURES, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
            "train": torch.arange(ROWS) < TRAIN,
        }

    def loss_sum(self, model, rows):
        loss = F.cross_entropy(model(rows["x"]), rows["label"], reduction="none")
        return (loss * rows["train"]).sum(), int(rows["train"].sum())

    def distribute(self, model, ctx):
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        os.environ.update(
            RANK=str(ctx.rank), WORLD_SIZE=str(ctx.world_size), LOCAL_RANK=str(ctx.rank)
        )
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO)
        model, self.optimizer = self.accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1)
        )
        return model

    def probe(self, model, batch, low, high):
        loss = F.cross_entropy(model(batch["x"][low:high]), batch["label"][low:high])
        self.accelerator.backward(loss)
        self.norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        (self.optimizer if self.by_optimizer else model).zero_grad()

    def step(self, model, batch, ctx):
        self.accelerator.step = 0
        for turn, (low, high) in enumerate(PARTS[ctx.rank]):
            with self.accelerator.accumulate(model):
                if turn == 0:
                    self.probe(model, batch, *HELD[ctx.rank])
                loss = F.cross_entropy(
                    model(batch["x"][low:high]), batch["label"][low:high], reduction="sum"
                )
                # accelerate divides by the micro-batches, DDP by the ranks
                self.accelerator.backward(loss * MICRO * ctx.world_size / TRAIN)


class Buggy(Clean):
    by_optimizer = True


EXPECT = dict(
    right=[
        r"(?i)held|probe|rows? .{0,60}(15|16|17|18|19|20)|extra|additional|left ?over"
        r"|stale|not (been )?(cleared|zeroed)|should not|do(es)? not (count|belong)"
        r"|uncounted|expected 0",
        r"(?i)rows?|gradient|zero_grad|probe|held",
        r"(?i)add|contribut|count|includ|stay|remain|left|kept|not (been )?(cleared"
        r"|zeroed)|accumulat|enter|weight|coefficient|extra|carr",
    ],
    place=[
        r"(?i)held|probe|zero_grad|rows? .{0,60}(15|16|17|18|19|20)|first micro.?batch"
        r"|left ?over|extra"
    ],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted twice",
        r"(?i)wrong divisor|mean of means|scaled by a (wrong )?factor",
        r"(?i)forward (is|goes|was) wrong|goes wrong in the forward",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|rows? .{0,20}(lost"
        r"|dropped|missing)",
        r"(?i)(only|just) (on )?rank [012]\b|rank [012] alone",
        r"(?i)(only|just) (the )?(body|head)|(body|head) alone",
        r"(?i)labels? (is|are) (wrong|shifted)",
    ],
)
WHY = (
    "On every rank the probe's backward leaves the gradient of the mean loss of the held-out rows / 3 (accelerate's division) in .grad, and the prepared optimizer's zero_grad, called in the first of three micro-batches where "
    "sync_gradients is false, does nothing. So the step's gradient has, besides the right one, (1/3) * (1/3) * the sum over ranks of the mean held-out gradient: rows 15 and 16 (rank 0) with 1/18 each, row 17 (rank 1) with 1/9, rows "
    "18 to 20 (rank 2) with 1/27, instead of 0. The training rows 0 to 14 have their right 1/15. All parameters, all ranks equally after DDP's average in the last micro-batch. Forward, divisor, reduction and micro-batches are right: "
    "gradients left over from another backward. Fix: clear with model.zero_grad() (or torch.autograd.grad for the probe, or probe outside accumulate)."
)
