"""Metric learning for product images: an encoder under DDP and a criterion with weights of its own (proxies of the classes, a bias and a learned temperature, as in Proxy-NCA), three ranks with two micro-batches each (no_sync for the
first). The criterion is not wrapped; its gradients are summed over the ranks with accelerate's reduce.

The bug: `reduce` of accelerate gives back a reduced copy and leaves its argument alone. The proxies' gradient is assigned from what it gives back, those of the bias and the temperature are passed to it and the result is dropped. After
the question of KevinMusgrave/pytorch-metric-learning on criterions with weights under DDP, and accelerate.utils.reduce, which clones.
"""

import contextlib
import os

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
SIDE, CHANNELS, WIDTH, CLASSES = 6, 2, 6, 5
PARTS = [[(0, 3), (3, 4)], [(4, 6), (6, 9)], [(9, 11), (11, 12)]]


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(CLASSES, WIDTH))
        self.bias = nn.Parameter(torch.randn(CLASSES) * 0.2)
        self.temperature = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x, label):
        cosine = F.normalize(x, dim=1) @ F.normalize(self.proxies, dim=1).T
        return F.cross_entropy(cosine * self.temperature.exp() + self.bias, label, reduction="sum")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(CHANNELS, 5, 3, padding=1),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(20, WIDTH),
        )
        self.criterion = Criterion()

    def forward(self, image, label):
        return self.criterion(self.encoder(image), label)


class Clean:
    in_place = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        return {
            "image": torch.randn(rows, CHANNELS, SIDE, SIDE, generator=g),
            "label": torch.randint(CLASSES, (rows,), generator=g),
        }

    def loss_sum(self, model, rows):
        return model(rows["image"], rows["label"]), len(rows["label"])

    def distribute(self, model, ctx):
        os.environ.update(
            RANK=str(ctx.rank), LOCAL_RANK=str(ctx.rank), WORLD_SIZE=str(ctx.world_size)
        )
        PartialState._reset_state()
        assert PartialState(cpu=True).num_processes == ctx.world_size
        model.encoder = DistributedDataParallel(model.encoder, process_group=ctx.group("dp"))
        return model

    def step(self, model, batch, ctx):
        parts, encoder = PARTS[ctx.rank], model.encoder
        for turn, (low, high) in enumerate(parts):
            last = turn == len(parts) - 1
            with contextlib.nullcontext() if last else encoder.no_sync():
                x = encoder(batch["image"][low:high]) * 1.0
                loss = model.criterion(x, batch["label"][low:high]) / len(batch["label"])
                loss.backward()
        for p in encoder.parameters():
            p.grad.mul_(ctx.world_size)
        for p in model.criterion.parameters():
            if p.dim() == 1 and self.in_place:
                reduce(p.grad, reduction="sum")
            else:
                p.grad = reduce(p.grad, reduction="sum")


class Buggy(Clean):
    in_place = True


EXPECT = dict(
    right=[
        r"(?i)temperature|criterion",
        r"(?i)reduc|all.?reduce|sum(med)?|communicat|synchron",
        r"(?i)not|never|own|local|without|missing|left out|skipped|lacks|dropped",
    ],
    place=[r"(?i)criterion\.?(bias|temperature)|bias|temperature|criterion"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(proxies|encoder\S*) (is|are) (wrong|not reduced|never reduced)",
        r"(?i)(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)broadcast from",
    ],
)
WHY = (
    "Forward, backward, encoder (DDP; its average times three is the sum) and proxies are right. criterion.bias and criterion.temperature keep each rank's own sum over its two micro-batches (rank 0 rows 0-3, rank 1 rows 4-8, rank 2 "
    "rows 9-11, each over the whole divisor 12): reduce makes a reduced clone which is dropped. The gradients differ between the ranks and their sum is the right gradient. Fix: p.grad = reduce(p.grad, reduction='sum') for them too."
)
