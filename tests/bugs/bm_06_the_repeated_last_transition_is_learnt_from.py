"""The value network of implicit Q-learning (expectile regression on the targets of a critic) with accelerate on three processes: seven transitions are dealt out by split_between_processes with
apply_padding, because the values are also gathered for the log and must be equally many everywhere; two micro-batches, the first under no_sync. The loss is divided by the number of transitions, which
accelerator.reduce sums over the processes, and multiplied by their number because DDP averages.

The bug: the rows that apply_padding adds on the processes with fewer rows are copies of the last transition, and they are kept in the loss and in its divisor; the documentation says that they have to be
dropped. After issues about split_between_processes, which was made for inference, used in training loops.
"""

import contextlib

import torch
from accelerate import Accelerator
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, STATE, WIDTH = 7, 5, 8
EXPECTILE = 0.8


class Value(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(STATE, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, state):
        return self.value(self.body(state))[:, 0]


def expectile(value, target):
    difference = target - value
    return (EXPECTILE - (difference < 0).to(value.dtype)).abs() * difference.square()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Value()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "state": torch.randn(ROWS, STATE, generator=g),
            "target": 2 * torch.randn(ROWS, generator=g),
        }

    def loss_sum(self, model, rows):
        return expectile(model(rows["state"]), rows["target"]).sum(), len(rows["target"])

    def distribute(self, model, ctx):
        return Accelerator(cpu=True).prepare(model)

    def share(self, batch, accelerator):
        """Equally many rows on every process, and which of them are its own."""
        with accelerator.split_between_processes(dict(batch), apply_padding=True) as part:
            some, more = divmod(len(batch["target"]), accelerator.num_processes)
            own = some + (accelerator.process_index < more)
            return part, (torch.arange(len(part["target"])) < own).to(part["target"].dtype)

    def step(self, model, batch, ctx):
        accelerator = Accelerator(cpu=True)
        model.zero_grad()
        part, weight = self.share(batch, accelerator)
        total = accelerator.reduce(weight.sum(), "sum")
        seen = []
        for n in range(2):
            state, target, w = (
                x.tensor_split(2)[n] for x in (part["state"], part["target"], weight)
            )
            with accelerator.no_sync(model) if n == 0 else contextlib.nullcontext():
                value = model(state)
                seen.append(value.detach())
                loss = (expectile(value, target) * w).sum() / total
                accelerator.backward(loss * accelerator.num_processes)
        self.logged = accelerator.gather(torch.cat(seen)).mean()


class Buggy(Clean):
    def share(self, batch, accelerator):
        with accelerator.split_between_processes(dict(batch), apply_padding=True) as part:
            return part, torch.ones_like(part["target"])


EXPECT = dict(
    right=[
        r"row|transition|sample|pad|data|batch|input",
        r"(twice|three times|3 times|again|repeat|duplicat|more than once|copies|copied|same row|pad(ded|ding)?|extra|overlap|several ranks|surplus)",
    ],
    place=[
        r"share",
        r"split_between_processes",
        r"pad",
        r"last (row|transition)",
        r"row(s)? .{0,12}6\b",
        r"rank(s)? .{0,12}[12]\b",
        r"\brows?\b",
    ],
    wrong=[
        r"not (been )?(all.?)?reduced|(gradients?|parameters?) .{0,20}(reduced|summed) (twice|again)",
        r"no_sync .{0,40}(wrong|missing|lost)|micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"backward formula|computes wrong in the forward",
        r"mean of means|row(s)? .{0,20}(is|are) (missing|never|not trained)",
    ],
)
WHY = (
    "split_between_processes with apply_padding gives all three processes three rows; processes 1 and 2 have only two of their own, and their third is a copy of the last transition, row 6. Buggy.share gives these copies the weight one, so "
    "row 6 counts three times (in its own place on process 2 and as padding on processes 1 and 2), and the divisor that is summed over the processes is nine instead of seven. Values, losses of the rows and process 0's gradients but for "
    "the divisor are right; the averaged gradients are sum over seven rows plus twice row 6, divided by nine, for all parameters and on all ranks. DDP, no_sync and the factor three are right. Fix: weight the padded rows zero, or drop them "
    "before the loss."
)
