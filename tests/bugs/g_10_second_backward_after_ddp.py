"""Segmentation with an early exit under DDP: the loss of both outputs, then self-distillation of the early one, each with a backward of
its own. After pytorch's forum and issue reports on several backwards per forward with DistributedDataParallel (the reducer waits for one
backward per forward; GAN and multi-loss training) and FAULTS class C14/C12: what the second backward adds stays on its rank.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, INPUTS, WIDTH, CLASSES = 11, 8, 3, 7, 4


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(INPUTS, WIDTH, 3, padding=1)
        self.early = nn.Conv1d(WIDTH, CLASSES, 1)
        self.norm, self.deep = (
            nn.GroupNorm(1, WIDTH),
            nn.Conv1d(WIDTH, WIDTH, 3, padding=2, dilation=2),
        )
        self.late = nn.Conv1d(WIDTH, CLASSES, 1)

    def forward(self, x):
        x = F.gelu(self.stem(x))
        early = self.early(x)
        return early, self.late(x + F.gelu(self.deep(self.norm(x))))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "labels": lambda m, r: (self.sums(m(r["x"]), r)[0], r["y"].numel()),
            "distill": lambda m, r: (2.0 * self.sums(m(r["x"]), r)[1], r["y"].numel()),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return Segmenter()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, LENGTH, generator=g),
            "y": torch.randint(CLASSES, (ROWS, LENGTH), generator=g),
        }

    @staticmethod
    def sums(out, rows):
        early, late = out
        labels = sum(F.cross_entropy(logits, rows["y"], reduction="sum") for logits in out)
        target = (late.detach() / 0.5).softmax(1)
        return labels, F.kl_div(early.log_softmax(1), target, reduction="sum")

    def loss_sum(self, model, rows):
        labels, distill = self.sums(model(rows["x"]), rows)
        return labels + 2.0 * distill, rows["y"].numel()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def backward(self, labels, distill):
        (labels + 2.0 * distill).backward()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        scale = ctx.world_size / batch["y"].numel()
        labels, distill = self.sums(model(mine["x"]), mine)
        self.backward(labels * scale, distill * scale)


class Buggy(Clean):
    def backward(self, labels, distill):
        labels.backward(retain_graph=True)
        (2.0 * distill).backward()


EXPECT = dict(
    right=[
        r"distill",
        r"(not|never|n't|no|missing|without|lacks?|un|only|skip\w*)[ -]?.{0,50}(reduc|summed|synchroni|averag|combin|added|rows|cross)|"
        r"differ\w*|partial|own (rows|part)|local|3 times|\b3\b",
    ],
    place=[r"distill", r"stem|early", r"ranks? \W?[012]|(all|every|each) ranks?"],
    wrong=[
        r"labels (term )?(is|was) (wrong|not (reduced|averaged)|never)",
        r"(late|deep|norm)\S* (is|are|was|were) (wrong|not reduced|never)",
        r"(counted|reduced|summed) (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (wrong|different)",
        r"distill\S* .{0,30}(missing|lost|dropped)( everywhere| on all)",
    ],
)
WHY = (
    "DDP reduces in the first backward after a forward; what the second one (distill) adds to stem.* and early.* stays on the rank: "
    "each has the distill gradient of its own rows alone, times 3 (the scale against DDP's average). The labels term and norm, deep, "
    "late are right."
)
