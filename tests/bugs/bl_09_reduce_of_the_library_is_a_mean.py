"""A small recurrent policy is trained with REINFORCE on three ranks under accelerate (DDP by `prepare`; seven episodes of unlike length, 3, 2 and 2 a rank; two micro-batches a rank, the first under `no_sync`). The
loss is minus the log-probability of the action times the advantage, summed over the real steps of the episodes; as DDP averages, it is multiplied by the number of processes and divided by the number of real
steps of all ranks, which the ranks reduce at the start of the step.

The bug: the count is reduced by `accelerate.utils.reduce` with its default, and that is the mean over the processes, where the collective of that name in torch sums by default (and so does `Accelerator.reduce`). After
issues and forum questions about accelerate's gather and reduce helpers and the token counts of gradient accumulation (num_items_in_batch).
"""

import os
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import reduce
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
SEEN, WIDTH, ACTIONS, LENGTH, ROWS = 4, 7, 3, 6, 7


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(SEEN, WIDTH)
        self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.choose = nn.Linear(WIDTH, ACTIONS)

    def forward(self, seen):
        x = torch.tanh(self.enter(seen))
        return self.choose(x + self.memory(x)[0]).log_softmax(-1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Policy()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "seen": torch.randn(ROWS, LENGTH, SEEN, generator=g),
            "action": torch.randint(ACTIONS, (ROWS, LENGTH), generator=g),
            "advantage": torch.randn(ROWS, LENGTH, generator=g),
            "steps": torch.tensor([6, 2, 4, 5, 3, 6, 1]),
        }

    def loss_sum(self, model, rows):
        chosen = model(rows["seen"]).gather(-1, rows["action"][..., None]).squeeze(-1)
        real = torch.arange(LENGTH) < rows["steps"][:, None]
        return -(chosen * rows["advantage"])[real].sum(), int(real.sum())

    def accelerator(self, ctx):
        os.environ.update(
            RANK=str(ctx.rank),
            LOCAL_RANK=str(ctx.rank),
            WORLD_SIZE=str(ctx.world_size),
            LOCAL_WORLD_SIZE=str(ctx.world_size),
        )
        return Accelerator(cpu=True)

    def distribute(self, model, ctx):
        return self.accelerator(ctx).prepare(model)

    def steps_of_all(self, steps):
        return reduce(steps.sum().to(torch.get_default_dtype()), reduction="sum")

    def step(self, model, batch, ctx):
        accelerator = self.accelerator(ctx)
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        scale = accelerator.num_processes / self.steps_of_all(mine["steps"])
        for n in range(2):
            with accelerator.no_sync(model) if n == 0 else nullcontext():
                loss, _ = self.loss_sum(model, {k: v.tensor_split(2)[n] for k, v in mine.items()})
                accelerator.backward(loss * scale)


class Buggy(Clean):
    def steps_of_all(self, steps):
        return reduce(steps.sum().to(torch.get_default_dtype()))


EXPECT = dict(
    right=[
        r"divisor|divided|normali[sz]|count|number of (real )?steps|factor|mean|scaled?|times|too large|multiplied",
        r"\b3(\.0+)?\b|three|world|number of (ranks|processes)|mean (over|of)|process|ranks|reduce",
    ],
    place=[r"steps_of_all", r"reduce", r"\bloss\b", r"scale", r"divisor|divided|count"],
    wrong=[
        r"gradients? .{0,30}not (been )?(all.?)?reduced|gradients? .{0,30}(reduced|summed) (twice|again)",
        r"divi(ded|des) by (its|their) own (count|number|steps)|mean of means",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"backward formula|(memory|enter|choose) .{0,20}(computes|is) wrong|(wrong|other) rows",
    ],
)
WHY = (
    "steps_of_all calls accelerate.utils.reduce without a reduction; its default is 'mean', so the number it returns is that of all real steps divided by three (27 / 3 = 9 instead of 27). The scale of the loss, number of "
    "processes / steps, is three times too large, the same on all ranks and in both micro-batches, and so are all gradients. The policy's outputs, the sum of the loss, DDP's average and no_sync are right. Fix: "
    "reduction='sum', or leave the factor of the number of processes out."
)
