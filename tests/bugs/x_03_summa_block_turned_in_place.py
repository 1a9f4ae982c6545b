"""Two-dimensional tensor parallelism after ColossalAI (colossalai/legacy/nn/layer/parallel_2d, Matmul_AB_2D / ABT_2D / ATB_2D; Xu et al., Optimus): a 2 x 2 grid, activations and weights in blocks, SUMMA products with broadcasts along
grid rows and columns and reductions to the owner. The layers' backward takes its three products from hand-written kernels. Weight gradients written as in nn.Linear, `grad_output.t() @ input`, and then turned round: `.t()` on a block turns the block,
but not the grid (a usual mistake of those who port 1D layers to Summa / Cannon layouts).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"row": 2, "col": 2}}}}
CATEGORIES, FIELDS, WIDTH, INNER, CLASSES, ROWS, MICRO = 17, 3, 12, 16, 10, 11, 2


class Grid:
    def __init__(self, ctx):
        self.mesh = ctx.mesh.mesh
        self.i, self.j = ctx.mesh.get_local_rank("row"), ctx.mesh.get_local_rank("col")
        self.along_row = ctx.group("col")  # same i, all j
        self.along_column = ctx.group("row")  # same j, all i

    def from_column(self, block, k):
        """The block of rank (i, k) on all (i, *)."""
        block = block.contiguous().clone()
        dist.broadcast(block, int(self.mesh[self.i, k]), group=self.along_row)
        return block

    def from_row(self, block, k):
        """The block of rank (k, j) on all (*, j)."""
        block = block.contiguous().clone()
        dist.broadcast(block, int(self.mesh[k, self.j]), group=self.along_column)
        return block

    def to_column(self, block, k):
        block = block.contiguous().clone()
        dist.all_reduce(block, group=self.along_row)
        return block if self.j == k else None

    def to_row(self, block, k):
        block = block.contiguous().clone()
        dist.all_reduce(block, group=self.along_column)
        return block if self.i == k else None


def matmul_ab(a, b, grid):
    return sum(grid.from_column(a, k) @ grid.from_row(b, k) for k in range(2))


def matmul_abt(a, b, grid):
    """a b^T: block (i, k) = sum over j of a(i, j) b(k, j)^T."""
    out = [grid.to_column(a @ grid.from_row(b, k).t(), k) for k in range(2)]
    return out[grid.j]


def matmul_atb(a, b, grid):
    """a^T b: block (k, j) = sum over i of a(i, k)^T b(i, j)."""
    out = [grid.to_row(grid.from_column(a, k).t() @ b, k) for k in range(2)]
    return out[grid.i]


def weight_gradient(x, g, grid):
    return matmul_atb(x, g, grid)


def turned_weight_gradient(x, g, grid):
    return matmul_atb(g, x, grid).t()  # (g^T x)^T, like nn.Linear


class Summa(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, grid, gradient):
        ctx.save_for_backward(x, weight)
        ctx.grid, ctx.gradient = grid, gradient
        return matmul_ab(x, weight, grid)

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return (
            matmul_abt(g, weight, ctx.grid),
            ctx.gradient(x, g, ctx.grid).contiguous(),
            None,
            None,
        )


class GatherColumns(torch.autograd.Function):
    """Blocks (i, *) to whole rows; all ranks of a grid row go on alike."""

    @staticmethod
    def forward(ctx, x, grid):
        ctx.j, ctx.width = grid.j, x.shape[1]
        blocks = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(blocks, x.contiguous(), group=grid.along_row)
        return torch.cat(blocks, 1)

    @staticmethod
    def backward(ctx, g):
        return g[:, ctx.j * ctx.width : (ctx.j + 1) * ctx.width].contiguous(), None


def local(p):
    return p.to_local() if isinstance(p, DTensor) else p


class Linear2D(nn.Module):
    def __init__(self, n, m):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, m) / n**0.5)  # (in, out)
        self.bias = nn.Parameter(torch.randn(m) / 3)
        self.grid, self.gradient = None, None

    def forward(self, x):
        if self.grid is None:
            return x @ self.weight + self.bias
        return Summa.apply(x, local(self.weight), self.grid, self.gradient) + local(self.bias)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(CATEGORIES, WIDTH)
        self.up, self.down, self.out = (
            Linear2D(WIDTH, INNER),
            Linear2D(INNER, WIDTH),
            Linear2D(WIDTH, CLASSES),
        )
        self.grid = None

    def forward(self, ids):
        x = F.embedding(ids, local(self.table.weight)).sum(1)
        x = x + self.down(F.silu(self.up(x)))
        x = self.out(torch.tanh(x))
        return x if self.grid is None else GatherColumns.apply(x, self.grid)


class Clean:
    gradient = staticmethod(weight_gradient)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(CATEGORIES, (ROWS, FIELDS), generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["ids"]), rows["label"], reduction="sum"), len(
            rows["label"]
        )

    def distribute(self, model, ctx):
        def put(module, name, placements):
            whole = getattr(module, name).data
            setattr(module, name, nn.Parameter(distribute_tensor(whole, ctx.mesh, placements)))

        model.grid = Grid(ctx)
        put(model.table, "weight", [Replicate(), Shard(1)])
        for layer in (model.up, model.down, model.out):
            put(layer, "weight", [Shard(0), Shard(1)])
            put(layer, "bias", [Replicate(), Shard(0)])
            layer.grid, layer.gradient = model.grid, self.gradient
        return model

    def step(self, model, batch, ctx):
        mine = {
            k: v.tensor_split(2)[model.grid.i] for k, v in batch.items()
        }  # rows of the grid row
        for m in range(MICRO):
            part = {k: v.tensor_split(MICRO)[m] for k, v in mine.items()}
            (self.loss_sum(model, part)[0] / len(batch["label"])).backward()
        for p in (model.table.weight, model.up.bias, model.down.bias, model.out.bias):
            dist.all_reduce(p.grad.to_local(), group=model.grid.along_column)


class Buggy(Clean):
    gradient = staticmethod(turned_weight_gradient)


EXPECT = dict(
    right=[
        r"(?i)swap|exchang|transpos|turned|block|mirror|other rank'?s|of rank \d|permut|wrong (rank|shard|place|position)|another rank|order|misplac|interchang|shard",
        r"(?i)up\.weight|down\.weight|out\.weight|weights? of (the )?(up|down|out|linear2d|2d)|linear2d|summa|weight gradient|gradient of (the |its )?weight|\bweights?\b",
        r"(?i)ranks? (\(?0, ?1\)?|\(?1, ?0\)?|1|2)\b|off.?diagonal|ranks 1 (and|,) ?2|\[1, 2\]|transpos|swap|block|grid",
    ],
    place=[r"(?i)weight gradient|(up|down|out)\.weight|summa|gradient of (the |its )?weight"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)table\S* (is|are) wrong|bias\S* (is|are) wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|reduced (twice|again)",
        r"(?i)divi(ded|des) by|divisor|factor (of )?(1/)?[24]\b",
        r"(?i)every rank is wrong|all (four )?ranks (are|get|hold) wrong|ranks? 0 (is|are) wrong|rank 3 (is|are) wrong",
        r"(?i)(rows?|micro.?batch(es)?) .{0,20}(lost|missing|read twice|dropped)",
        r"(?i)input gradient (is|are) wrong|gradient of the input is wrong",
    ],
)
WHY = (
    "The weight gradient is computed as (g^T x)^T with the SUMMA product and a local .t(). Block (i, j) of g^T x is the transpose of block (j, i) of dW = x^T g, so rank (i, j) ends up with block (j, i): for up, down and out, the ranks (0,1) and (1,0) (global ranks 1 and 2) hold each other's weight gradient; "
    "the diagonal blocks on ranks 0 and 3 are right. The values are complete sums, only in the wrong place of the grid; no factor. Forward, loss, input gradients, biases and the embedding table are right on all ranks. Fix: matmul_atb(x, g), or exchange blocks across the grid after the local transpose."
)
