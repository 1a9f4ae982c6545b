"""A small diffusion model trained by rectified flow on 2 x 2 ranks: two data parallel ranks with two micro-batches each, and an MLP cut by DTensor's tensor parallel plan. The noisy latents are (1 - t) latents + t noise, the target of the
velocity is noise - latents. Noise and times are part of the batch. The divisor is the number of images.

The bug: to save memory the mixture is written into the (copied) latents, and the target is taken from them afterwards. After the many trainers with latents.mul_().add_() or lerp(out=), and the question which of the tensors the difference is
taken from, as in lucidrains/pi-zero-pytorch issue 13 (flow matching objective correction?).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
WIDTH, HIDDEN, KINDS, ROWS = 7, 12, 4, 11
PARTS = [[(0, 3), (3, 5)], [(5, 9), (9, 11)]]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x, shift):
        return x + self.down(F.silu(self.up(self.norm(x) + shift)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.time, self.kinds = nn.Linear(4, WIDTH), nn.Embedding(KINDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, noisy, time, kind):
        waves = torch.cat([time, time * 3, time * 7, time * 11], 1).sin()
        shift = self.time(waves) + self.kinds(kind)
        x = self.enter(noisy)
        for block in self.blocks:
            x = block(x, shift)
        return self.leave(x)


def mix(latents, noise, time, out=None):
    """The straight way from the latents (time 0) to the noise (time 1)."""
    return torch.lerp(latents, noise, time.expand_as(latents), out=out)


class Clean:
    reuse = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "latents": torch.randn(ROWS, WIDTH, generator=g),
            "noise": torch.randn(ROWS, WIDTH, generator=g),
            "time": 0.1 + 0.8 * torch.rand(ROWS, 1, generator=g),
            "kind": torch.randint(KINDS, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        noisy = mix(rows["latents"], rows["noise"], rows["time"])
        velocity = model(noisy, rows["time"], rows["kind"])
        target = rows["noise"] - rows["latents"]
        return F.mse_loss(velocity, target, reduction="sum"), len(target)

    def distribute(self, model, ctx):
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, ctx.mesh["tp"], plan)
        return model

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        for low, high in PARTS[ctx.coords["dp"]]:
            latents, noise = batch["latents"][low:high].clone(), batch["noise"][low:high]
            time, kind = batch["time"][low:high], batch["kind"][low:high]
            noisy = mix(latents, noise, time, out=latents if self.reuse else None)
            velocity = model(noisy, time, kind)
            loss = F.mse_loss(velocity, noise - latents, reduction="sum")
            (loss / ROWS).backward()
        for p in model.parameters():
            grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            dist.all_reduce(grad, group=ctx.group("dp"))


class Buggy(Clean):
    reuse = True


EXPECT = dict(
    right=[
        r"(?i)target|latents|noise|mse_loss|mse|loss|label",
        r"(?i)target|in.?place|overwrit|written|changed|lerp|mix|argument|other (value|number)|times|1 ?- ?t|label",
    ],
    place=[r"(?i)mse_loss|mse|target|latents|noise - |sub|lerp|mix|\bloss\b"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"(?i)(model|enter|blocks?|up|down|leave).{0,25}forward.{0,15}(is|goes) wrong|forward goes wrong in (enter|blocks|leave)",
        r"(?i)other rows|wrong rows|only (on )?rank [0-3]\b|backward formula",
    ],
)
WHY = (
    "In the step mix(..., out=latents) writes the noisy latents into the copy `latents`, so noisy and latents are one tensor, and the target noise - latents is noise - noisy = (1 - t) (noise - latents): each row's target is (1 - t) times the right "
    "one. The model's input, its whole forward and its output are right on all ranks, in all micro-batches and rows; only the second argument of mse_loss is wrong. All gradients are wrong, on all four ranks, equally after the sum over dp. "
    "The tensor parallel plan, sum over dp, divisor 11 are right. Fix: take the target before the mixture is written, or do not write it in place."
)
