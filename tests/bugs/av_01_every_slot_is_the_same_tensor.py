"""Weighted data parallelism by hand on four ranks with 2, 4, 3 and 2 images: every rank accumulates the mean gradient of its own images over its micro-batches (sums over the own count), the flat gradient is all-gathered, and every rank
adds the gathered vectors with the weights own count / all images. A small convolutional regressor, micro-batches of at most two images.

The bug: the list for the gather is `[torch.empty_like(flat)] * world`, four times the same tensor; what arrives last stands in every slot. As in pytorch/pytorch issue 14632 (check that allgather output tensors point to different
storage; list replication refers to the same storage) and meta-pytorch/torchcomms PR 2553 (callers passing [buffer] * world_size).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
OWN, MICRO, SIDE = [2, 4, 3, 2], 2, 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 5, 3, padding=1)
        self.body = nn.Conv2d(5, 6, 3, stride=2)
        self.norm = nn.LayerNorm(24)
        self.out = nn.Linear(24, 3)

    def forward(self, x):
        x = F.silu(self.body(F.silu(self.stem(x))))
        return self.out(self.norm(x.flatten(1)))


class Clean:
    repeated = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = sum(OWN)
        return {
            "image": torch.randn(rows, 2, SIDE, SIDE, generator=g),
            "target": torch.randn(rows, 3, generator=g),
        }

    def loss_sum(self, model, rows):
        error = model(rows["image"]) - rows["target"]
        return error.square().sum(), len(error)

    def slots(self, flat, world):
        if self.repeated:
            return [torch.empty_like(flat)] * world
        return [torch.empty_like(flat) for _ in range(world)]

    def step(self, model, batch, ctx):
        first = sum(OWN[: ctx.rank])
        own = OWN[ctx.rank]
        for part in torch.arange(first, first + own).split(MICRO):
            rows = {k: v[part] for k, v in batch.items()}
            (self.loss_sum(model, rows)[0] / own).backward()
        parameters = list(model.parameters())
        flat = torch.cat([p.grad.flatten() for p in parameters])
        slots = self.slots(flat, ctx.world_size)
        dist.all_gather(slots, flat, group=ctx.group("dp"))
        total = torch.zeros_like(flat)
        for count, slot in zip(OWN, slots):
            total += slot * (count / sum(OWN))
        at = 0
        for p in parameters:
            p.grad.copy_(total[at : at + p.numel()].view_as(p))
            at += p.numel()


class Buggy(Clean):
    repeated = True


EXPECT = dict(
    right=[
        r"(?i)reduc|gather|transport|exchange|combin|sync|slots?\b|collective|aggregat",
        r"(?i)(last rank|rank 3|one rank|single rank|same (tensor|storage|buffer)|alias|(other|remaining) ranks?|ranks? 0\D{0,12}(1\D{0,8}2|2)).{0,160}"
        r"|(rows?|images?) .{0,20}(9|0).{0,120}",
        r"(?i)(only|alone|last|nothing|lost|missing|dropped|left out|absent|ignored|no (part|share|weight|contribution)|weight 0|coefficient 0"
        r"|overwrit|replac|same (tensor|storage|buffer)|alias|instead of|never (arriv|reach|enter))",
    ],
    place=[
        r"(?i)reduc|gather|slots?\b|all (parameters|tensors|modules)|every (parameter|tensor|module)|exchange"
    ],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced at all|every rank (keeps|holds|has) its own|ranks (differ|disagree)",
        r"(?i)(reduced|summed|counted) (twice|again)",
        r"(?i)mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(stem|body|norm|out)(\.\w+)? (alone|only)",
    ],
)
WHY = (
    "Every rank's own gradient (mean over its 2, 4, 3, 2 images, all micro-batches) is right. The four slots of the gather are one tensor, so after the all_gather all of them hold what was written last, the vector of rank 3. The "
    "weighted sum is then (2 + 4 + 3 + 2) / 11 times rank 3's mean: all four ranks agree and hold the mean gradient of rows 9 and 10 alone (each with weight 1/2 instead of 1/11); rows 0-8 (ranks 0-2) have no weight. All "
    "parameters. Forward, micro-batches and the weights are right. Fix: [torch.empty_like(flat) for _ in range(world)]."
)
