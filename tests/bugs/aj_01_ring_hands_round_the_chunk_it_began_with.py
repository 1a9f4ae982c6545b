"""Data parallel regression on four ranks (rows 3, 2, 4, 2), two micro-batches each. The gradients of all parameters are put into one flat buffer, cut into four pieces, and summed by a ring all-reduce written by hand with isend and recv:
three steps of reduce-scatter (pieces travel to the right neighbour and are added), then three steps of all-gather (finished pieces travel to the right and replace).

The bug: after the reduce-scatter rank r has finished piece r + 1, but the all-gather begins with piece r (the one the rank began the reduce-scatter with), as if the finished piece had the number of the rank. After pytorch/pytorch
issue 31572 (wrong example of our own ring all-reduce in the tutorial; fixed by pytorch/tutorials PR 1039) and NVIDIA/FasterTransformer PR 672 (indexing bug in the all-gather half of a two-shot all-reduce).
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
FEATURES, WIDTH, TARGETS = 5, 7, 3
PARTS = [[(0, 2), (2, 3)], [(3, 4), (4, 5)], [(5, 8), (8, 9)], [(9, 10), (10, 11)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, TARGETS)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(h + torch.tanh(self.second(h)))


def ring_all_reduce(flat, group, begin):
    """The sum over the group, in place. begin: offset of the piece that opens the all-gather."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    right = dist.get_global_rank(group, (rank + 1) % size)
    left = dist.get_global_rank(group, (rank - 1) % size)
    pieces = flat.tensor_split(size)

    def exchange(out, into):
        got = torch.empty_like(into)
        work = dist.isend(out.clone(), right, group=group)
        dist.recv(got, left, group=group)
        work.wait()
        return got

    for turn in range(size - 1):
        out, into = (rank - turn) % size, (rank - turn - 1) % size
        pieces[into].add_(exchange(pieces[out], pieces[into]))
    for turn in range(size - 1):
        out, into = (rank + begin - turn) % size, (rank + begin - turn - 1) % size
        pieces[into].copy_(exchange(pieces[out], pieces[into]))


class Clean:
    begin = 1

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        return {
            "x": torch.randn(rows, FEATURES, generator=g),
            "y": torch.randn(rows, TARGETS, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["x"]) - rows["y"]).square().sum(), len(rows["x"])

    def step(self, model, batch, ctx):
        total = len(batch["x"])
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            (self.loss_sum(model, rows)[0] / total).backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        ring_all_reduce(flat, ctx.group("dp"), self.begin)
        at = 0
        for p in model.parameters():
            p.grad.copy_(flat[at : at + p.numel()].view_as(p))
            at += p.numel()


class Buggy(Clean):
    begin = 0


EXPECT = dict(
    right=[
        r"(?i)reduc|ring|sum(med)? over|all.?gather|piece|chunk|bucket|buffer",
        r"(?i)(only|alone|just|single|one rank|own|missing|lack|lost|without|not (been )?(fully |all )?(summed|added|reduced)|never|overwrit|unfinished|incomplete|partial)",
        r"(?i)rank|contribution|piece|chunk",
    ],
    place=[r"(?i)reduc|ring|piece|chunk|range|element|buffer|(first|second|last)\.(weight|bias)"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong|differs)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)(reduced|summed|counted|added) (twice|again)",
        r"(?i)micro.?batch(es)? .{0,20}(is|are|was|were) (lost|dropped|never read|overwritten)",
        r"(?i)only the (last|first) micro.?batch",
        r"(?i)backward of|adjoint",
    ],
)
WHY = (
    "Forward, loss, divisor 11, micro-batches and the local gradients of all ranks are right; the hand-written ring all-reduce is wrong. After its reduce-scatter rank r holds the finished sum of piece (r + 1) % 4, and the all-gather "
    "should start by sending that piece. It starts with piece r, which on rank r still contains rank r's own contribution only (it was sent in the first step and nothing was added to it). These unfinished pieces go round and "
    "overwrite the rest, the finished piece as well. At the end all four ranks agree, and piece c of the flat gradient (tensor_split of the 122 elements: 0-30, 31-61, 62-91, 92-121) is rank c's own gradient alone; the contributions "
    "of the three other ranks are lost. So every parameter is wrong: first.weight (0-34) is rank 0's gradient and in its last four elements rank 1's; first.bias rank 1's; second.weight (42-90) rank 1's up to 61, then rank 2's; "
    "second.bias rank 2's in one element, then rank 3's; last.weight and last.bias rank 3's. Fix: all-gather with (rank + 1 - turn) % size out and (rank - turn) % size in."
)
