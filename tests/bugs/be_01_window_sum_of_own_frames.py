"""Speech enhancement with time parallelism on three ranks (4, 3 and 2 frames of every utterance), two micro-batches of uneven size. The network turns every frame of features into a short piece of samples; the pieces are windowed and
overlap-added, and the sum is divided by the overlap-added squared window. A rank owns the samples that begin with its frames; what its last frames leave beyond them goes to the next rank (with its adjoint in the backward).

The bug: the samples of the previous rank's last frames arrive, but the divisor (the sum of squared windows) is made of the own frames only, so the first samples of ranks 1 and 2 are divided by too little. After the normalisation by the
squared window of librosa PR 235 (Add squared window normalization to istft) and streaming overlap-add, where the envelope of the previous chunk must be carried along like its samples.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"time": 3}}}}
FRAMES, FEATURES, HIDDEN, LENGTH, HOP, ROWS = 9, 5, 7, 6, 2, 5
BOUNDS = [0, 4, 7, 9]
PARTS = [(0, 3), (3, 5)]
TAIL = LENGTH - HOP


def window(like):
    places = torch.arange(LENGTH, dtype=like.dtype) + 0.5
    return torch.sin(math.pi * places / LENGTH)


def overlap_add(pieces):
    """(rows, frames, length) -> (rows, (frames - 1) * hop + length)."""
    total = (pieces.shape[1] - 1) * HOP + LENGTH
    columns = pieces.transpose(1, 2)
    return F.fold(columns, (1, total), (1, LENGTH), stride=(1, HOP)).reshape(len(pieces), total)


class FromPrevious(torch.autograd.Function):
    """The tail of the previous rank; the gradient goes back to where it came from."""

    @staticmethod
    def forward(ctx, tail, group):
        ctx.group, ctx.rank, ctx.size = group, dist.get_rank(group), dist.get_world_size(group)
        tails = [torch.empty_like(tail) for _ in range(ctx.size)]
        dist.all_gather(tails, tail.contiguous(), group=group)
        return tails[ctx.rank - 1].clone() if ctx.rank else torch.zeros_like(tail)

    @staticmethod
    def backward(ctx, grad):
        grads = [torch.empty_like(grad) for _ in range(ctx.size)]
        dist.all_gather(grads, grad.contiguous(), group=ctx.group)
        if ctx.rank == ctx.size - 1:
            return torch.zeros_like(grad), None
        return grads[ctx.rank + 1].clone(), None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(FEATURES, HIDDEN)
        self.leave = nn.Linear(HIDDEN, LENGTH)

    def forward(self, features):
        pieces = self.leave(F.silu(self.enter(features)))
        return pieces * window(pieces)


def squared_windows(count, like):
    return overlap_add((window(like) ** 2).expand(1, count, LENGTH))[0]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "features": torch.randn(ROWS, FRAMES, FEATURES, generator=g),
            "wave": torch.randn(ROWS, (FRAMES - 1) * HOP + LENGTH, generator=g),
        }

    def loss_sum(self, model, rows):
        pieces = model(rows["features"])
        sound = overlap_add(pieces) / squared_windows(FRAMES, pieces)
        return (sound - rows["wave"]).pow(2).sum(), rows["wave"].numel()

    def envelope(self, low, high, like):
        return squared_windows(FRAMES, like)[low * HOP : (high - 1) * HOP + LENGTH]

    def step(self, model, batch, ctx):
        group, place = ctx.group("time"), ctx.coords["time"]
        low, high = BOUNDS[place], BOUNDS[place + 1]
        own = (high - low) * HOP + (TAIL if high == FRAMES else 0)
        for first, last in PARTS:
            pieces = model(batch["features"][first:last, low:high])
            sound = overlap_add(pieces)
            before = FromPrevious.apply(sound[:, -TAIL:], group)
            sound = torch.cat([sound[:, :TAIL] + before, sound[:, TAIL:]], 1)
            sound = sound[:, :own] / self.envelope(low, high, sound)[:own]
            wave = batch["wave"][first:last, low * HOP : low * HOP + own]
            ((sound - wave).pow(2).sum() / batch["wave"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def envelope(self, low, high, like):
        return squared_windows(high - low, like)


EXPECT = dict(
    right=[
        r"(?i)envelope|window|overlap|boundar|edge|first samples|head|halo|seam|divi|normali|own frames|shard|beginning",
        r"(?i)forward|value|divi|normali|denominator|envelope|window|scale|larger|too (big|large|little|small)|local|own",
        r"(?i)ranks? 1|ranks? \[?1, ?2|ranks? 2|not (on )?rank 0|except rank 0|all but (the first|rank 0)|own|local|shard|boundar|edge|seam",
    ],
    place=[r"(?i)envelope|squared_windows|window|overlap|sound|leave|\bstep\b|Net\b"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) twice|counted twice",
        r"(?i)(backward|adjoint) of FromPrevious (is|goes) wrong|FromPrevious.{0,40}(overwrit|drops|loses)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the (first|last) micro.?batch",
        r"(?i)only (on )?rank 0\b|rank 0 alone|rank 0 (goes|is) wrong",
        r"(?i)stale|left over|mean of means|labels? .{0,20}(is|are) wrong",
    ],
)
WHY = (
    "Ranks 1 and 2 (frames 4-6 and 7-8, samples 8-13 and 14-21), all rows, both micro-batches: the first four (LENGTH - HOP) samples contain the tail that the previous rank's last frames leave there, but `envelope` in Buggy overlap-adds "
    "the squared windows of the own frames only, so the divisor lacks the previous rank's frames and these samples are too large. On the other side, in the sliced-off tail of ranks 0 and 1 nothing goes wrong (it is not owned). Rank 0's "
    "own samples 0-7 are right in the forward; its last frames still get wrong gradients, because their tail is in the samples of rank 1 and the gradient comes back from there. The exchange and its adjoint, the all-reduce and the divisor "
    "of the loss are right. Fix: the envelope from all frames, cut to the own samples (or exchange the envelope's tail as well)."
)
