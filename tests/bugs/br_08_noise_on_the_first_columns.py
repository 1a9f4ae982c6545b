"""Deep kernel learning: a small encoder, an RBF kernel of its outputs and noise on the diagonal, negative log marginal likelihood of tasks with eight points each. The points of a task are cut over three ranks
(3, 3 and 2): a rank encodes its points, gathers those of the others, makes its rows of the kernel matrix and gathers the rows; the solve is done by all. Two micro-batches of tasks.

The bug: a rank adds the noise to its block of rows with eye(rows, points), whose ones lie in the first columns, whatever rows the block has. After row-partitioned kernel matrices (exact GPs on many GPUs) and
`torch.eye(*block.shape)`.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"points": 3}}}}
TASKS, POINTS, FEATURES, WIDTH, LATENT = 5, 8, 3, 6, 2


class DeepKernel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, LATENT)
        )
        self.log_scale = nn.Parameter(torch.tensor(0.3))
        self.log_noise = nn.Parameter(torch.tensor(-0.7))

    def covariance(self, a, b):
        d2 = (a[:, :, None] - b[:, None]).square().sum(-1)
        return self.log_scale.exp() * (-d2 / 2).exp()

    def noise(self):
        return self.log_noise.exp()


def negative_log_likelihood(k, y):
    solved = torch.linalg.solve(k, y[..., None])[..., 0]
    return ((y * solved).sum() + torch.linalg.slogdet(k)[1].sum()) / 2


class GatherPoints(torch.autograd.Function):
    """Along dimension 1; every rank goes on in its own way, so the gradients are summed."""

    @staticmethod
    def forward(fctx, own, lo, hi, group):
        fctx.place, fctx.group = (lo, hi), group
        full = own.new_zeros(own.shape[0], POINTS, own.shape[2])
        full[:, lo:hi] = own
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad[:, slice(*fctx.place)], None, None, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return DeepKernel()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(TASKS, POINTS, FEATURES, generator=g),
            "y": torch.randn(TASKS, POINTS, generator=g),
        }

    def loss_sum(self, model, rows):
        z = model.encoder(rows["x"])
        eye = torch.eye(POINTS, dtype=z.dtype)
        k = model.covariance(z, z) + model.noise() * eye
        return negative_log_likelihood(k, rows["y"]), len(z)

    def kernel_rows(self, model, z, z_all, lo, hi):
        block = model.covariance(z, z_all)
        eye = torch.eye(POINTS, dtype=z.dtype)[lo:hi]
        return block + model.noise() * eye

    def step(self, model, batch, ctx):
        own = torch.arange(POINTS).tensor_split(ctx.world_size)[ctx.rank]
        lo, hi = int(own[0]), int(own[-1]) + 1
        group = ctx.group("points")
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            x, y = (batch[k].tensor_split(2)[n] for k in ("x", "y"))
            z = model.encoder(x[:, lo:hi])
            rows = self.kernel_rows(model, z, GatherPoints.apply(z, lo, hi, group), lo, hi)
            k = GatherPoints.apply(rows, lo, hi, group)
            # the same on all ranks: a share each
            (negative_log_likelihood(k, y) / ctx.world_size / TASKS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def kernel_rows(self, model, z, z_all, lo, hi):
        block = model.covariance(z, z_all)
        eye = torch.eye(*block.shape[1:], dtype=z.dtype)
        return block + model.noise() * eye


EXPECT = dict(
    right=[
        r"noise|diagonal|eye|kernel_rows|identity|block|column|\brows\b",
        r"(rank|shard|block|own|local|lo\b|offset|first|global|place|column|row|start|zero).{0,120}(diagonal|noise|eye|column|row|place|offset|begin|start|index|position|value|block)"
        r"|rank(s)? (1|2|0)",
    ],
    place=[r"kernel_rows", r"\beye\b", r"noise", r"GatherPoints|block"],
    wrong=[
        r"gradients?.{0,40}(not|never) reduced|reduced twice|counted twice|mean of means|divisor",
        r"gather.{0,30}(without|no) gradient|adjoint|detached|symmetr.{0,30}half",
        r"noise.{0,30}(counted|added) (three times|on every rank)|rank 0('s rows)? (is|are) wrong",
    ],
)
WHY = (
    "Row lo + i of the kernel matrix needs the noise in column lo + i. The buggy kernel_rows() makes eye(rows, points), with ones in the columns 0, 1, 2, for every block: rank 0's rows are right, on ranks 1 and 2 the "
    "noise stands left of the diagonal and the diagonal has none. The gathered matrix, hence the likelihood and all gradients on all ranks, is another one, in both micro-batches; gathers, adjoints and the final sum are "
    "right. A right cause names the noise / diagonal of the rank's block of rows, which must start at its own first row. Fix: eye(points)[lo:hi]."
)
