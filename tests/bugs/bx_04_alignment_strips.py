"""A sequence encoder trained with soft-DTW against a shorter target sequence; the twelve frames of each example are cut over three ranks (strips of the alignment table). A rank encodes its frames, receives the last row of
the table from the rank before it, computes its rows and sends its own last row on; the last rank has the loss. Backward goes the other way with the gradient of the boundary row. Two micro-batches, gradients are summed over the ranks.

The bug: the corner in front of a strip's first row is 0 on every rank, as at the beginning of the whole table, where it should be infinite on all but the first: an alignment may begin anew at each strip for free. After tiled/wavefront
soft-DTW ports (pytorch-softdtw-cuda forks), where the padding R[0,0] = 0 is set by the routine that each tile calls.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"time": 3}}}}
ROWS, FRAMES, STEPS, FEATURES, WIDTH, CODE = 4, 12, 5, 3, 6, 2
FAR, GAMMA = 1e6, 0.7


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(FEATURES, WIDTH)
        self.outer = nn.Linear(WIDTH, CODE)
        self.template = nn.Linear(CODE, CODE)

    def distances(self, x, y):
        z = self.outer(torch.tanh(self.inner(x)))
        return (z[:, :, None] - self.template(y)[:, None]).square().sum(-1)


def soft_min(*terms):
    return -GAMMA * torch.logsumexp(-torch.stack(terms) / GAMMA, 0)


def alignment_rows(distances, above):
    """The last row of the table; above: the row before, with the corner in front of it."""
    for i in range(distances.shape[1]):
        left = torch.full_like(above[:, 0], FAR)
        row = [left]
        for j in range(distances.shape[2]):
            left = distances[:, i, j] + soft_min(above[:, j], above[:, j + 1], left)
            row.append(left)
        above = torch.stack(row, 1)
    return above[:, 1:]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Encoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FRAMES, FEATURES, generator=g),
            "y": torch.randn(ROWS, STEPS, CODE, generator=g),
        }

    def loss_sum(self, model, rows):
        d = model.distances(rows["x"], rows["y"])
        above = torch.full((len(d), STEPS + 1), FAR, dtype=d.dtype)
        above[:, 0] = 0
        return alignment_rows(d, above)[:, -1].sum(), len(d)

    def above_strip(self, boundary, ctx):
        """The row above this rank's first one, corner first."""
        corner = torch.full_like(boundary[:, :1], 0.0 if ctx.rank == 0 else FAR)
        return torch.cat([corner, boundary], 1)

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        first, last = ctx.rank == 0, ctx.rank == ctx.world_size - 1
        for i in range(2):
            part = {k: x.tensor_split(2)[i] for k, x in batch.items()}
            d = model.distances(part["x"].tensor_split(ctx.world_size, 1)[ctx.rank], part["y"])
            boundary = torch.full((len(d), STEPS), FAR, dtype=d.dtype)
            if not first:
                dist.recv(boundary, ctx.rank - 1)
                boundary.requires_grad_()
            row = alignment_rows(d, self.above_strip(boundary, ctx))
            if last:
                (row[:, -1].sum() / ROWS).backward()
            else:
                dist.send(row.detach().contiguous(), ctx.rank + 1)
                grad = torch.empty_like(row)
                dist.recv(grad, ctx.rank + 1)
                row.backward(grad)
            if not first:
                dist.send(boundary.grad.contiguous(), ctx.rank - 1)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("time"))


class Buggy(Clean):
    def above_strip(self, boundary, ctx):
        return torch.cat([torch.zeros_like(boundary[:, :1]), boundary], 1)


EXPECT = dict(
    right=[
        r"corner|boundary|above|initial|start|begin|border|forward",
        r"zero|\b0\b|infinit|FAR|every rank|each (rank|strip)|rank 0|first rank|later ranks|anew|forward|rank 1|rank 2",
    ],
    place=[r"above_strip", r"corner", r"alignment_rows", r"boundary", r"\bsend\b|\brecv\b"],
    wrong=[
        r"parameters?.{0,30}(not reduced|reduced twice|never reduced)|missing (all.?)?reduc",
        r"gradient.{0,30}(not|never) sent|stops at the boundary|detach",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|divisor|mean of means",
        r"(wrong|other) (rows|group)",
    ],
)
WHY = (
    "The cell in front of the boundary row is 0 on all three ranks; on ranks 1 and 2 it has to be infinite, as only the whole table begins there. So the first cell of their first row may begin a path for free, the alignment's beginning is skipped, and the "
    "last rows of ranks 1 and 2 and the loss are wrong in the forward; frames of rank 0 get a gradient that is much too small, and the others a wrong one. A right cause names the initial/boundary value of the strips on ranks 1 and 2 (forward). "
    "Exchange of the boundary and of its gradient, reduction and divisor are right. Fix: corner = 0 on the first rank only."
)
