"""A small super-resolution network (pixel shuffle) under DDP on two ranks (3 and 2 of 5 pictures),
one picture a micro-batch, no_sync but for the last. The loss is perceptual: the features of two
stages of transformers' ResNet (frozen, in eval), caught by forward hooks. The features of the true
pictures are made ahead, without a graph, and wait in one queue a stage for their micro-batch.

Bug: the hooks put them at the end of the queue, and the loss takes them from the end too, so the
micro-batches meet the targets in reverse order. After perceptual losses with prefetched targets.
"""

from collections import defaultdict
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import ResNetConfig, ResNetModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, SIDE, STAGES = 5, 4, (0, 1)


class Enlarge(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(2, 6, 3, padding=1)
        self.body = nn.Conv2d(6, 6, 3, padding=1)
        self.leave = nn.Conv2d(6, 2 * 4, 3, padding=1)

    def forward(self, x):
        h = F.gelu(self.enter(x))
        return F.pixel_shuffle(self.leave(h + torch.tanh(self.body(h))), 2)


def frozen_judge(seed):
    torch.manual_seed(seed)
    config = ResNetConfig(
        num_channels=2,
        embedding_size=5,
        hidden_sizes=[5, 7],
        depths=[1, 1],
        layer_type="basic",
        hidden_act="gelu",
    )
    judge = ResNetModel(config)
    for module in judge.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.3, 1.5)
    return judge.requires_grad_(False).eval()


class Ear:
    """Catches what the stages of the judge give out."""

    def __init__(self, judge):
        self.judge, self.caught = judge, defaultdict(list)
        for stage in STAGES:
            self.listen(stage)

    def listen(self, stage):
        def hook(module, args, out):
            self.caught[stage].append(out)

        self.judge.encoder.stages[stage].register_forward_hook(hook)

    def hear(self, picture):
        self.judge(picture)

    def take(self, stage):
        return self.caught[stage].pop(0)


class EarOfTheLatest(Ear):
    def take(self, stage):
        return self.caught[stage].pop()


def apart(made, true):
    made, true = F.normalize(made, dim=1), F.normalize(true, dim=1)
    return (made - true).square().sum(1).mean((1, 2)).sum()


class Clean:
    ear = Ear

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 101)
        return Enlarge()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1010)
        return {
            "small": torch.randn(ROWS, 2, SIDE, SIDE, generator=g),
            "large": torch.randn(ROWS, 2, 2 * SIDE, 2 * SIDE, generator=g),
        }

    def judge_like(self, x):
        return frozen_judge(self.seed + 102).to(x.dtype)

    def loss_sum(self, model, rows):
        judge, made = self.judge_like(rows["large"]), model(rows["small"])
        heard = [judge(p, output_hidden_states=True).hidden_states for p in (made, rows["large"])]
        loss = sum(apart(heard[0][stage + 1], heard[1][stage + 1]) for stage in STAGES)
        return loss + 0.1 * (made - rows["large"]).abs().mean((1, 2, 3)).sum(), len(made)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        ranks = ctx.axes["dp"]
        parts = torch.arange(ROWS).tensor_split(ranks)[ctx.coords["dp"]].split(1)
        true = self.ear(self.judge_like(batch["large"]))
        made_ear = Ear(self.judge_like(batch["large"]))
        with torch.no_grad():
            for part in parts:
                true.hear(batch["large"][part])
        for i, part in enumerate(parts):
            with nullcontext() if i == len(parts) - 1 else model.no_sync():
                made = model(batch["small"][part])
                made_ear.hear(made)
                loss = sum(apart(made_ear.take(stage), true.take(stage)) for stage in STAGES)
                loss = loss + 0.1 * (made - batch["large"][part]).abs().mean((1, 2, 3)).sum()
                (loss * ranks / ROWS).backward()


class Buggy(Clean):
    ear = EarOfTheLatest


EXPECT = dict(
    right=[
        r"target|feature|true|caught|queue|judge|hook|perceptual|EarOfTheLatest",
        r"\border|revers|\blast\b|latest|pop\(|\bend\b|lifo|stack|swap|permut|another|"
        r"other (micro|row|picture|sample|target)|wrong (micro|row|picture|sample|target)",
        r"micro.?batch|row|picture|sample|part|pop|take|queue",
    ],
    place=[
        r"EarOfTheLatest",
        r"\btake\b",
        r"\.pop\(",
        r"self\.caught|\bcaught\b",
        r"true\.take|self\.ear",
    ],
    wrong=[
        r"no_sync.{0,40}(wrong|missing|too)",
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"(batch.?norm|running).{0,40}(wrong|train|own)",
        r"(divisor|denominator|normali[sz]).{0,40}(wrong|local|own)",
        r"(micro.?batch|rank).{0,30}mean of means",
    ],
)
WHY = """The hooks append the true pictures' features in the order of the parts. The loss must
take them from the front; EarOfTheLatest.take pops from the end, so on rank 0 rows 0 and 2 have
changed their targets (row 1 is right), on rank 1 rows 3 and 4. The L1 part has the right target.
All parameters get wrong gradients; DDP, no_sync and the divisor are right.
Fix: pop(0), or a deque with popleft()."""
