"""A weather model on a latitude-longitude grid, cut into strips of latitude over three ranks (4, 3 and 2 rows), two micro-batches. Each convolution needs one row above and below and one column on either side: rows come from the
neighbours, columns from the other end of the circle, and beyond a pole lies the pole's own row, half a turn further.

The bug: the strip is first padded around the circle and then gets its rows, so half a turn beyond the pole is half of the padded width, and a roll of a row that holds two columns twice: the row beyond the pole is off by one column. Rows from neighbours are right. Padding at the poles of global
models: the geocyclic padding of ClimaX- and Pangu-like code, NVIDIA/modulus (physicsnemo) and similar.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
FIELDS, HIDDEN, HEIGHT, WIDTH, ROWS = 2, 5, 9, 8, 5
STRIPS = [(0, 4), (4, 7), (7, 9)]
TURNS = [(0, 2), (2, 5)]


class Neighbours(torch.autograd.Function):
    """The last row of the strip above and the first row of the strip below (zeros at the poles)."""

    @staticmethod
    def exchange(first, last, group):
        mine = torch.stack([first, last])
        all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(all_of_them, mine, group=group)
        return all_of_them

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.shape = group, x.shape
        rank, edges = dist.get_rank(group), Neighbours.exchange(x[:, :, 0], x[:, :, -1], group)
        none = torch.zeros_like(x[:, :, 0])
        above = edges[rank - 1][1] if rank > 0 else none
        below = edges[rank + 1][0] if rank + 1 < len(edges) else none
        return above.unsqueeze(2), below.unsqueeze(2)

    @staticmethod
    def backward(ctx, above, below):
        rank = dist.get_rank(ctx.group)
        grads = Neighbours.exchange(above.squeeze(2), below.squeeze(2), ctx.group)
        dx = above.new_zeros(ctx.shape)
        if rank > 0:
            dx[:, :, 0] += grads[rank - 1][1]
        if rank + 1 < len(grads):
            dx[:, :, -1] += grads[rank + 1][0]
        return dx, None


def around(x):
    return torch.cat([x[..., -1:], x, x[..., :1]], -1)


def opposite(row):
    return row.roll(row.shape[-1] // 2, -1)


def with_rows(x, group):
    above, below = Neighbours.apply(x, group)
    if dist.get_rank(group) == 0:
        above = opposite(x[:, :, :1])
    if dist.get_rank(group) + 1 == dist.get_world_size(group):
        below = opposite(x[:, :, -1:])
    return torch.cat([above, x, below], 2)


def whole_sphere(x):
    return around(torch.cat([opposite(x[:, :, :1]), x, opposite(x[:, :, -1:])], 2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(FIELDS, HIDDEN, 3), nn.Conv2d(HIDDEN, HIDDEN, 3)
        self.last = nn.Conv2d(HIDDEN, FIELDS, 1)

    def forward(self, x, pad=whole_sphere):
        x = F.silu(self.first(pad(x)))
        x = x + F.silu(self.second(pad(x)))
        return self.last(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "now": torch.randn(ROWS, FIELDS, HEIGHT, WIDTH, generator=g),
            "next": torch.randn(ROWS, FIELDS, HEIGHT, WIDTH, generator=g),
        }

    def loss_sum(self, model, rows):
        return F.mse_loss(model(rows["now"]), rows["next"], reduction="sum"), len(rows["now"])

    def pad(self, x, group):
        return around(with_rows(x, group))

    def step(self, model, batch, ctx):
        group, (top, bottom) = ctx.group("sp"), STRIPS[ctx.rank]
        for low, high in TURNS:
            now, later = (batch[k][low:high, :, top:bottom] for k in ("now", "next"))
            guess = model(now, lambda x: self.pad(x, group))
            (F.mse_loss(guess, later, reduction="sum") / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def pad(self, x, group):
        return with_rows(around(x), group)


EXPECT = dict(
    right=[
        r"(?i)pad|pole|halo|opposite|roll|edge|border|first|second|convolution|input|row (above|below|beyond)",
        r"(?i)forward|input|pad|roll|shift|off by|column|order|wrong (row|column|value)|pole|halo|goes wrong",
        r"(?i)ranks? 0|ranks? 2|first and (the )?last|pole|both ends|outer|edge|top|bottom",
    ],
    place=[r"(?i)pad|pole|halo|opposite|\bfirst\b|convolution|roll|edge"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|reduced over",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|from micro.?batch|state left",
        r"(?i)only (on )?rank [012]\b|rank 1 (is|goes) wrong first|rank 1 alone",
        r"(?i)backward of .{0,30} is wrong|wrong backward|backward formula|adjoint|detach",
        r"(?i)targets? .{0,20}(is|are) wrong|recomput|dropout|stale|neighbour'?s? rows? (is|are) (lost|wrong|missing)",
    ],
)
WHY = (
    "Only at the poles, rank 0 (top) and rank 2 (bottom), in all micro-batches and rows of the batch: the row beyond the pole must be the pole's row of 8 columns rolled by 4, and then padded around the circle. Buggy.pad pads around the circle first and "
    "`opposite` rolls the 10 padded columns by 5, so the row beyond the pole is shifted by one column and has the doubled columns in its middle. The input of the first convolution (and of the second) is wrong in one row on ranks 0 and 2; rank 1's "
    "input is right at the first convolution (the neighbours' rows are right), and at the second gets wrong rows from its neighbours only through their outputs. All parameters' gradients are wrong through these rows. The exchange, "
    "its backward, the sum over sp and the divisor 5 are right. Fix: take the rows first, then pad around: around(with_rows(x))."
)
