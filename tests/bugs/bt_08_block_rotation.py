"""Two linear layers by Cannon's algorithm on a 2 x 2 mesh: activations and weights are cut into blocks in both dimensions, the blocks are skewed first (row i's activation blocks go i places to the left, column j's
weight blocks j places up) and then rotated, each rank multiplies what it holds in each turn. In the backward the partial gradients of the blocks met in the turns are summed over the row (inputs) and the column (weights) of
the mesh. Two micro-batches; the parameters' blocks are put together at the end.

The bug: the backward puts the partial gradient of turn t into the slot of block t, as if the rotation had started unskewed with block 0 on every rank; met in turn t was block (i + j + t) mod 2.
After 2D tensor parallel linear layers by Cannon's algorithm (Optimus / Colossal-AI style code).
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"row": 2, "col": 2}}}}
ROWS, INNER, HIDDEN, OUT = 10, 6, 8, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(INNER, HIDDEN) / 2)
        self.second = nn.Parameter(torch.randn(HIDDEN, OUT) / 2)

    def forward(self, x):
        return torch.tanh(x @ self.first) @ self.second


def shift(x, group, places):
    """The block of the rank `places` further on in the group (ranks in a ring)."""
    me, size = dist.get_rank(group), dist.get_world_size(group)
    if places % size == 0:
        return x
    to = dist.get_global_rank(group, (me - places) % size)
    source = dist.get_global_rank(group, (me + places) % size)
    got = torch.empty_like(x)
    sent = dist.isend(x.contiguous(), to, group=group)
    dist.recv(got, source, group=group)
    sent.wait()
    return got


class CannonMatmul(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, w, i, j, in_row, in_col):
        fctx.place, fctx.groups = (i, j), (in_row, in_col)
        a, b = shift(x, in_row, i), shift(w, in_col, j)
        out, met = 0, []
        for t in range(2):
            met += [a, b]
            out = out + a @ b
            if t == 0:
                a, b = shift(a, in_row, 1), shift(b, in_col, 1)
        fctx.save_for_backward(*met)
        return out

    @staticmethod
    def backward(fctx, grad):
        (i, j), (in_row, in_col) = fctx.place, fctx.groups
        met = fctx.saved_tensors
        blocks_x, blocks_w = [None, None], [None, None]
        for t in range(2):
            k = (i + j + t) % 2
            blocks_x[k] = grad @ met[2 * t + 1].T
            blocks_w[k] = met[2 * t].T @ grad
        dx, dw = torch.stack(blocks_x), torch.stack(blocks_w)
        dist.all_reduce(dx, group=in_row)
        dist.all_reduce(dw, group=in_col)
        return dx[j], dw[i], None, None, None, None


class CannonLinear(CannonMatmul):
    @staticmethod
    def backward(fctx, grad):
        (i, j), (in_row, in_col) = fctx.place, fctx.groups
        met = fctx.saved_tensors
        dx = torch.stack([grad @ met[2 * t + 1].T for t in range(2)])
        dw = torch.stack([met[2 * t].T @ grad for t in range(2)])
        dist.all_reduce(dx, group=in_row)
        dist.all_reduce(dw, group=in_col)
        return dx[j], dw[i], None, None, None, None


def block(x, i, j):
    return x.chunk(2, 0)[i].chunk(2, 1)[j]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INNER, generator=g),
            "y": torch.randn(ROWS, OUT, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["x"]) - rows["y"]).square().sum(), len(rows["x"])

    def matmul(self, x, w, ctx):
        i, j = ctx.coords["row"], ctx.coords["col"]
        in_row, in_col = ctx.group("col"), ctx.group("row")  # ranks of my row, of my column
        return CannonMatmul.apply(x, w, i, j, in_row, in_col)

    def step(self, model, batch, ctx):
        i, j = ctx.coords["row"], ctx.coords["col"]
        for n in range(2):
            rows = {k: v.split([6, 4])[n] for k, v in batch.items()}
            h = torch.tanh(self.matmul(block(rows["x"], i, j), block(model.first, i, j), ctx))
            y = self.matmul(h, block(model.second, i, j), ctx)
            ((y - block(rows["y"], i, j)).square().sum() / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("row", "col"))


class Buggy(Clean):
    def matmul(self, x, w, ctx):
        i, j = ctx.coords["row"], ctx.coords["col"]
        in_row, in_col = ctx.group("col"), ctx.group("row")
        return CannonLinear.apply(x, w, i, j, in_row, in_col)


EXPECT = dict(
    right=[
        r"backward|gradient|adjoint|way back",
        r"order|slot|turn|skew|rotat|block|swap|permut|exchang|misplac|other (rank|half|part|place|block)|position|index",
    ],
    place=[
        r"CannonLinear|Cannon",
        r"matmul",
        r"\bdx\b|\bdw\b",
        r"first|second",
        r"all_reduce.{0,60}(row|col)",
    ],
    wrong=[
        r"parameters?.{0,40}(not reduced|reduced twice|never reduced)|missing (all.?)?reduc|wrong group",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|divisor|mean of means|world.?size",
        r"forward (is|value|output).{0,20}wrong|loss value is wrong",
        r"detached|no gradient|(wrong|other) (rows|labels)",
    ],
)
WHY = (
    "On the ranks with i + j odd, (0,1) and (1,0), the skewed rotation meets block 1 in turn 0 and block 0 in turn 1, but CannonLinear.backward stacks the partial gradients in the order of the turns, so that these ranks swap the two "
    "blocks; the ranks (0,0) and (1,1) are in order. The sums over row and column then add the gradient of block 0 from one rank to that of block 1 from the other, and all ranks' input and weight gradients of both layers are wrong. "
    "Forward and loss are right. A right cause says that the backward of the Cannon product puts its partial gradients at the wrong block (order of turns, skew forgotten). Fix: slot (i + j + t) mod 2."
)
