"""A denoising diffusion model in a pipeline of three stages by hand (p2p, GPipe order, micro-batches of 3, 3 and 2 rows). The first stage makes the
noisy input and the last one the loss, each draws steps and noise itself from a generator of the same seed instead of sending them. After
reports on generators that run out of step between ranks that draw other things.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, PIXELS, WIDTH, STEPS, MICRO = 8, 10, 12, 50, 3


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.time = nn.Linear(PIXELS, WIDTH), nn.Embedding(STEPS, WIDTH)

    def forward(self, x, t):
        return self.enter(x) + self.time(t)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 17),
            nn.Linear(17, WIDTH),
        )

    def forward(self, h):
        return h + self.down(F.silu(self.up(self.norm(h))))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        last = nn.Sequential(Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, PIXELS))
        self.stages = nn.ModuleList([First(), Block(), last])


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Denoiser()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {"x": torch.randn(ROWS, PIXELS, generator=g) * 0.8, "id": torch.arange(ROWS)}

    def generator(self):
        return torch.Generator().manual_seed(self.seed + 77)

    def draw(self):
        g = self.generator()
        t = torch.randint(STEPS, (ROWS,), generator=g)
        return t, torch.randn(ROWS, PIXELS, generator=g)

    def draw_noise(self):
        return self.draw()[1]

    @staticmethod
    def noisy(x, t, noise):
        kept = torch.cos((t + 0.5) / STEPS * 1.5).to(x.dtype)[:, None]
        return kept * x + (1 - kept.square()).sqrt() * noise.to(x.dtype)

    @staticmethod
    def loss(guess, noise):
        return (guess - noise.to(guess.dtype)).square().sum()

    def loss_sum(self, model, rows):
        t, noise = (v[rows["id"]] for v in self.draw())
        h = model.stages[0](self.noisy(rows["x"], t, noise), t)
        return self.loss(model.stages[2](model.stages[1](h)), noise), rows["x"].numel()

    def distribute(self, model, ctx):
        for i in range(3):
            if i != ctx.coords["pp"]:
                model.stages[i] = nn.Identity()
        return model

    def step(self, model, batch, ctx):
        me, group = ctx.coords["pp"], ctx.group("pp")
        stage, parts = model.stages[me], torch.arange(ROWS).tensor_split(MICRO)
        before, behind = me - 1, me + 1
        entered, left = [], []
        if me == 0:
            t, noise = self.draw()
        elif me == 2:
            noise = self.draw_noise()
        for own in parts:
            if me == 0:
                out = stage(self.noisy(batch["x"][own], t[own], noise[own]), t[own])
            else:
                h = torch.empty(len(own), WIDTH, dtype=ctx.dtype)
                dist.recv(h, dist.get_global_rank(group, before), group=group)
                entered.append(h.requires_grad_())
                out = stage(h)
            if me == 2:
                out = self.loss(out, noise[own]) / batch["x"].numel()
            else:
                dist.send(out.detach(), dist.get_global_rank(group, behind), group=group)
            left.append(out)
        for i, out in enumerate(left):
            grad = None
            if me < 2:
                grad = torch.empty_like(out)
                dist.recv(grad, dist.get_global_rank(group, behind), group=group)
            out.backward(grad)
            if me:
                dist.send(entered[i].grad, dist.get_global_rank(group, before), group=group)


class Buggy(Clean):
    def draw_noise(self):
        return torch.randn(ROWS, PIXELS, generator=self.generator())


EXPECT = dict(
    right=[
        r"loss|target|noise|argument|line|sub",
        r"loss|target|noise|argument|sub\b|outside|last",
    ],
    place=[r"loss|noise|stages\.2|stage|line", r"rank|stages\.2|last"],
    wrong=[
        r"forward is right up to .{0,40}goes wrong in stages",
        r"(wrong|other|stale) micro.?batch",
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(own|local) (count|denominator|divisor)",
        r"backward of .{0,20}stages\.[01]\S* .{0,20}(is|goes) wrong",
    ],
)
WHY = (
    "The last stage draws the noise from the generator without having drawn the steps before, so its noise, the target of the loss, is another than "
    "that which the first stage put into the input: on rank 2 the target of all rows in all micro-batches is wrong. Every module's forward is right; "
    "the loss's gradient is wrong at the start of the backward, and with it the gradients of all three stages."
)
