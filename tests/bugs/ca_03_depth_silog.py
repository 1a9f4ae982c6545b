"""Monocular depth with transformers' GLPN (small config, batch norms frozen) under DDP over three ranks with uneven rows and two accumulated micro-batches. The loss is GLPN's scale invariant log loss over all valid pixels of the batch:
sqrt(mean d^2 - mean(d)^2 / 2) with d the difference of logarithms. The right step sums the three statistics over micro-batches and ranks in a pass without graph and then goes backward through them.

The bug: the step takes the loss that the model returns for each micro-batch, with its square root over that micro-batch's own pixels, and averages these over micro-batches and ranks.
After the report class "normalizer_mean_of_means" (transformers PR 34191 and the like), here for a loss that is no mean: the root of a variance.
"""

import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GLPNConfig, GLPNForDepthEstimation

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, SIZE, ACCUMULATION, MAX_DEPTH = 7, (8, 16), 2, 5


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"silog": (self.statistics, self.silog)}

    def build(self):
        torch.manual_seed(self.seed)
        config = GLPNConfig(
            num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[4, 6], strides=[4, 2],
            patch_sizes=[7, 3], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=4,
            max_depth=MAX_DEPTH, drop_path_rate=0.0, initializer_range=0.3,
        )  # fmt: skip
        return GLPNForDepthEstimation(config).eval()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        depth = 0.2 + MAX_DEPTH * torch.rand(ROWS, *SIZE, generator=g)
        depth = depth * torch.linspace(0.3, 1.5, ROWS)[:, None, None]
        holes = torch.rand(ROWS, *SIZE, generator=g) < torch.rand(ROWS, 1, 1, generator=g) * 0.6
        return {
            "pixel_values": torch.randn(ROWS, 3, *SIZE, generator=g),
            "labels": depth.masked_fill(holes, 0),
        }

    @staticmethod
    def statistics(model, rows):
        predicted = model(pixel_values=rows["pixel_values"]).predicted_depth
        valid = rows["labels"] > 0
        d = torch.log(rows["labels"][valid]) - torch.log(predicted[valid])
        return torch.stack([d.square().sum(), d.sum(), valid.sum().to(d.dtype)])

    @staticmethod
    def silog(s, num_rows):
        return torch.sqrt(s[0] / s[2] - 0.5 * (s[1] / s[2]).square())

    def loss_sum(self, model, rows):
        return self.silog(self.statistics(model, rows), None), 1

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, find_unused_parameters=False)

    def micro_batches(self, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        return [
            {k: v.tensor_split(ACCUMULATION)[i] for k, v in mine.items()}
            for i in range(ACCUMULATION)
        ]

    def prepare(self, model, micro_batches, ctx):
        with torch.no_grad():
            total = sum(self.statistics(model, part) for part in micro_batches)
        dist.all_reduce(total, group=ctx.group("dp"))
        total.requires_grad_()
        (self.slope,) = torch.autograd.grad(self.silog(total, None), total)

    def compute_loss(self, model, part, ctx):
        return (self.statistics(model, part) * self.slope).sum() * ctx.world_size  # DDP averages

    def step(self, model, batch, ctx):
        micro_batches = self.micro_batches(batch, ctx)
        self.prepare(model, micro_batches, ctx)
        for i, part in enumerate(micro_batches):
            last = i == ACCUMULATION - 1
            with contextlib.nullcontext() if last else model.no_sync():
                self.compute_loss(model, part, ctx).backward()


class Buggy(Clean):
    def prepare(self, model, micro_batches, ctx):
        pass

    def compute_loss(self, model, part, ctx):
        outputs = model(pixel_values=part["pixel_values"], labels=part["labels"])
        return outputs.loss / ACCUMULATION


EXPECT = dict(
    right=[
        r"own|local|per.?rank|per.?micro|each (micro|rank)|every (micro|rank)|mean of|averag|of its|micro.?batch|separately",
        r"statistic|sqrt|root|non.?linear|mean|average|silog|term|variance|pixels|rows|count|divisor|normali[sz]",
    ],
    place=[
        r"compute_loss",
        r"outputs\.loss|SiLog",
        r"silog",
        r"micro",
        r"statistics",
        r"every rank|all ranks|each rank|own (rows|statistic)",
    ],
    wrong=[
        r"gradient.{0,30}(not|never) reduced|missing (all.?)?reduc",
        r"counted (twice|two times)|reduced (twice|again)|repeated (reduc|all.?reduce)",
        r"only the last micro.?batch|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|(wrong|other) rows",
        r"valid mask is wrong|labels? shifted|batch.?norm",
    ],
)
WHY = (
    "The root of the scale invariant loss is taken of two means over all valid pixels of the batch. compute_loss takes outputs.loss, which is the root over one micro-batch's own pixels (one or two images), divides by two, and DDP averages over "
    "three ranks: an average of six roots, each with its own mean, variance and count. Gradients of all parameters are wrong on all ranks, alike, since DDP's sum itself is right. A right cause says that the nonlinear term is computed from "
    "the statistics of each micro-batch/rank instead of the whole batch's. Fix: sum the statistics over micro-batches and ranks first."
)
