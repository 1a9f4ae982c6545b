"""A small denoiser (diffusion, noise and level in the batch) under FSDP2 on three ranks. FSDP needs as many forwards on each rank, so accelerate's split_between_processes(apply_padding=True) hands out the
eight rows: 3, 3 and 2, and the last one fills up with a copy of the last row. Micro-batches of one row each, so three on each rank, synchronised after the third. FSDP averages: the sum is multiplied by the
number of ranks and divided by the number of rows, which is added up over the ranks.

The bug: the copy that fills up the last rank's share is trained on and counted, as a ninth row. After accelerate's documentation and issues on apply_padding ("remember to drop the padded samples", gather_for_metrics
does not know of them).
"""

import os

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn
from torch.distributed.fsdp import fully_shard

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
CHANNELS, WIDTH, LENGTH, ROWS = 2, 6, 7, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.level = nn.Linear(2, 2 * WIDTH)

    def forward(self, x, level):
        scale, shift = self.level(level).unsqueeze(-1).chunk(2, 1)
        return x + torch.tanh(self.mix(x) * (1 + scale) + shift)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Conv1d(CHANNELS, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.leave = nn.Conv1d(WIDTH, CHANNELS, 1)

    def forward(self, clean, noise, time):
        a, s = (
            torch.cos(time * torch.pi / 2)[:, None, None],
            torch.sin(time * torch.pi / 2)[:, None, None],
        )
        level = torch.stack([time, torch.sin(6 * time)], -1)
        x = self.enter(a * clean + s * noise)
        for block in self.blocks:
            x = block(x, level)
        return (self.leave(x) - (a * noise - s * clean)).square().mean((1, 2))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Denoiser()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "clean": torch.randn(ROWS, CHANNELS, LENGTH, generator=g),
            "noise": torch.randn(ROWS, CHANNELS, LENGTH, generator=g),
            "time": torch.rand(ROWS, generator=g),
        }

    def loss_sum(self, model, rows):
        return model(rows["clean"], rows["noise"], rows["time"]).sum(), len(rows["time"])

    def distribute(self, model, ctx):
        for key, value in (
            ("RANK", ctx.rank),
            ("LOCAL_RANK", ctx.rank),
            ("WORLD_SIZE", ctx.world_size),
            ("LOCAL_WORLD_SIZE", ctx.world_size),
        ):
            os.environ[key] = str(value)
        self.state = PartialState(cpu=True)
        for block in model.blocks:
            fully_shard(block, mesh=ctx.mesh)
        fully_shard(model, mesh=ctx.mesh)
        return model

    def share(self, batch, ctx):
        """This rank's rows and how much each of them counts."""
        with self.state.split_between_processes(dict(batch), apply_padding=True) as mine:
            pass
        here, more = divmod(ROWS, ctx.world_size)
        real = here + (ctx.rank < more)
        return mine, (torch.arange(len(mine["time"])) < real).to(mine["time"].dtype)

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine, counts = self.share(batch, ctx)
        total = counts.sum()
        dist.all_reduce(total, group=ctx.group("dp"))
        for n in range(len(counts)):
            model.set_requires_gradient_sync(n == len(counts) - 1)
            part = {k: v[n : n + 1] for k, v in mine.items()}
            loss = (model(**part) * counts[n]).sum()
            (loss * ctx.world_size / total).backward()


class Buggy(Clean):
    def share(self, batch, ctx):
        with self.state.split_between_processes(dict(batch), apply_padding=True) as mine:
            return mine, torch.ones_like(mine["time"])


EXPECT = dict(
    right=[
        r"last row|row 7|rows? .{0,20}(twice|again|repeat|duplicat|more than once|2 times)|pad|copy|copies|duplicat|repeat|ninth|nine|9 rows|weight.{0,20}row|row.{0,20}(weight|count)",
        r"twice|two times|again|pad|cop(y|ies)|duplicat|repeat|more than once|9|nine|\b2\b|extra|counted",
    ],
    place=[
        r"\bshare\b",
        r"split_between_processes",
        r"rank 2|last rank",
        r"row 7|last row|rows? \[?7",
        r"padding|apply_padding",
    ],
    wrong=[
        r"not (been )?(all.?)?reduced|gradients?.{0,20}(reduced|summed) (twice|again)|missing (all.?)?reduc|wrong group",
        r"mean of means|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch|sync.{0,20}(early|late|off)",
        r"backward formula|(mix|level|enter|leave) .{0,20}(computes|is) wrong|FSDP.{0,30}(does not average|divides twice)",
        r"rows? .{0,20}(missing|never (read|seen)|left out|skipped)",
    ],
)
WHY = (
    "split_between_processes(apply_padding=True) fills the third rank's two rows (6, 7) up with a copy of row 7, so that all ranks do three forwards; Buggy.share gives the copy the weight one. Row 7 is counted twice, on rank 2 "
    "in the second and third micro-batch, and the count summed over the ranks is nine where it should be eight: the gradient is that of the mean of nine rows, that is rows 0-6 with 8/9 and row 7 with 16/9 of their "
    "weight. The per-row losses, FSDP's reduction and the sync after the third micro-batch are right. Fix: give the filled-up rows weight zero, so that the count is eight."
)
