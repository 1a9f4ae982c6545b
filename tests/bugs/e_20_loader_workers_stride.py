"""A diffusion model fed by a stream that is split over ranks and loader workers. After huggingface/datasets issues 3423 and 5360 and
lance issue 2713 ("Sharded samplers don't account for dataloader's multiprocess workers"): the stride forgets the workers.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, CHANNELS, LENGTH, STEPS, WORKERS = 14, 2, 8, 10, 2


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(1, width), nn.Conv1d(width, width, 3, padding=1)
        self.shift = nn.Linear(5, width)

    def forward(self, x, time):
        return x + self.conv(F.silu(self.norm(x) + self.shift(time)[..., None]))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(STEPS, 5)
        self.first = nn.Conv1d(CHANNELS, 6, 1)
        self.down = nn.Conv1d(6, 6, 2, stride=2)
        self.outer, self.inner = Block(6), Block(6)
        self.up = nn.ConvTranspose1d(6, 6, 2, stride=2)
        self.last = nn.Conv1d(6, CHANNELS, 3, padding=1)

    def forward(self, x, t):
        time = F.silu(self.time(t))
        x = self.outer(self.first(x), time)
        return self.last(x + self.up(self.inner(self.down(x), time)))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Denoiser()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, CHANNELS, LENGTH, generator=g).cumsum(-1) / 2,
            "noise": torch.randn(ROWS, CHANNELS, LENGTH, generator=g),
            "t": torch.randint(STEPS, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        keep = (1 - (rows["t"].to(rows["x"].dtype) + 1) / (STEPS + 1))[:, None, None]
        noisy = keep.sqrt() * rows["x"] + (1 - keep).sqrt() * rows["noise"]
        snr = (keep / (1 - keep)).clamp(max=3.0)
        loss = snr * (model(noisy, rows["t"]) - rows["noise"]).square()
        return loss.sum(), rows["x"].numel()

    def stride(self, ctx):
        return ctx.world_size * WORKERS

    def stream(self, batch, ctx):
        """What the workers of this rank's loader yield, one micro-batch each."""
        for worker in range(WORKERS):
            rows = range(ctx.rank * WORKERS + worker, ROWS, self.stride(ctx))
            yield {k: v[list(rows)] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        for micro in self.stream(batch, ctx):
            loss, _ = self.loss_sum(model, micro)
            (loss / (ROWS * CHANNELS * LENGTH)).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def stride(self, ctx):
        return ctx.world_size


EXPECT = dict(
    right=[
        r"rows?|sampl|data|loader|stream|worker",
        r"twice|two times|\b2\b|double|duplicat|repeat|overlap|more than once|again|both|several (ranks|times)|same rows",
    ],
    place=[r"rows?|sampl", r"loader|stream|worker|stride", r"ranks?"],
    wrong=[
        r"(all|every) (the )?rows? (is|are|was|were|count) .{0,20}(twice|two times|double)",
        r"rows? .{0,20}(is|are|was|were) (lost|missing|dropped|never)",
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"gradients? (is|are|was|were) (reduced|summed) (twice|again)",
        r"mean of (the )?means",
        r"forward (pass )?(is|was) wrong",
    ],
)
WHY = (
    "Workers start at 0..5 but step by 3 ranks instead of 6 workers: rows 0, 1 and 2 are read once, each row from 3 on is read by two "
    "workers (for example rows 3, 6, 9, 12 by rank 0 worker 0 and by rank 1 worker 1), so rows 3 to 13 count twice."
)
