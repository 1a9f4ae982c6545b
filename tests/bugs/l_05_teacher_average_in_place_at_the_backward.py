"""Consistency training of a small diffusion model: the target comes from the moving average of the weights, which is swapped into the
model for the second forward. Modelled on torch_ema's `average_parameters()` / diffusers' `ema.store(); ema.copy_to(); ema.restore()`
and the reports on calling backward before `restore`: the backward runs while the average is in the weights (`.data` moves no version
counter).
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, INPUTS, WIDTH, MICRO_BATCHES = 14, 5, 12, 2


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(INPUTS + 2, WIDTH)
        self.norm, self.body = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, INPUTS)

    def forward(self, x, sigma):
        h = F.silu(self.embed(torch.cat([x, sigma.log()[:, None], sigma[:, None]], 1)))
        h = h + F.silu(self.body(self.norm(h)))
        share = 1 / (1 + sigma.square())[:, None]
        return share * x + (1 - share) * self.out(h)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.average = Denoiser(), Denoiser().requires_grad_(False)
        for slow, fast in zip(self.average.parameters(), self.online.parameters()):
            slow.data.mul_(0.3).add_(fast.data, alpha=0.7)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Pair()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        low = torch.rand(ROWS, generator=g) + 0.2
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "noise": torch.randn(ROWS, INPUTS, generator=g),
            "low": low,
            "high": low * (1.5 + torch.rand(ROWS, generator=g)),
        }

    @staticmethod
    def distance(guess, target, rows):
        huber = ((guess - target).square().sum(1) + 0.01).sqrt() - 0.1
        return (huber / (rows["high"] - rows["low"])).sum()

    @staticmethod
    def noised(rows, sigma):
        return rows["x"] + rows[sigma][:, None] * rows["noise"], rows[sigma]

    def loss_sum(self, model, rows):
        with torch.no_grad():
            target = model.average(*self.noised(rows, "low"))
        return self.distance(model.online(*self.noised(rows, "high")), target, rows), len(rows["x"])

    @contextmanager
    def averaged(self, model):
        kept = [p.detach().clone() for p in model.online.parameters()]
        for fast, slow in zip(model.online.parameters(), model.average.parameters()):
            fast.data.copy_(slow.data)
        yield
        for fast, old in zip(model.online.parameters(), kept):
            fast.data.copy_(old)

    def micro_step(self, model, rows):
        guess = model.online(*self.noised(rows, "high"))
        with self.averaged(model):
            with torch.no_grad():
                target = model.online(*self.noised(rows, "low"))
        (self.distance(guess, target, rows) / ROWS).backward()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for i in range(MICRO_BATCHES):
            self.micro_step(model, {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()})
        for param in model.online.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def micro_step(self, model, rows):
        guess = model.online(*self.noised(rows, "high"))
        with self.averaged(model):
            with torch.no_grad():
                target = model.online(*self.noised(rows, "low"))
            (self.distance(guess, target, rows) / ROWS).backward()


EXPECT = dict(
    right=[
        r"backward|gradient (of|at|into|entering|leaving|through|with respect to) (the )?(input|out|body|norm|activation)",
        r"\bout\b|body|weights?|in.?place|changed|overwritten|saved|other weights|modif|differ",
    ],
    place=[r"\bout\b|online\.out", r"body|norm|embed", r"(all|every|each) ranks?|ranks? \W?[012]"],
    wrong=[
        r"forward (pass )?(is|was|of .{0,20}is) wrong|first wrong .{0,20}forward",
        r"(never|not) (been )?(all.?)?(reduced|summed|averaged)",
        r"(reduced|counted|summed) (twice|again|\d times)",
        r"mean of (the )?(rank |ranks' )?means",
        r"online\.out\.(weight|bias) (is|are|has|have) (a )?wrong",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "The backward runs while the averaged weights lie in the storage of the online weights, so gradients flow back through online.out "
    "with the teacher's weight (and through body and norm likewise). online.out has right gradients, body, norm and embed wrong ones, "
    "on all ranks and in all micro-batches; forward and loss are right."
)
