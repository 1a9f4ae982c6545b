"""A weather emulator (residual convolutions with stochastic depth) whose global field is cut into latitude strips over three ranks: every rank holds some latitudes of all samples, exchanges one row of halo before each convolution,
and predicts its own latitudes. Stochastic depth drops the branch of a block for a whole sample; its numbers come from a generator seeded with the sample's id and the block. Two micro-batches, gradients summed over the ranks.

The bug: the seed of the generator has the rank in it, as Megatron's model-parallel seed has, so that the strips of one sample do not drop the same blocks.
After ecmwf/anemoi-core issue 595 (dropout with model sharding, random seed generation) and huggingface/transformers issue 31412.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"lat": 3}}}}
ROWS, VARIABLES, LATITUDES, LONGITUDES, WIDTH, DEPTH = 7, 3, 11, 6, 5, 3
KEEP = 0.6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3)
        self.mix = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, padded):
        wide = F.pad(padded, (1, 1, 0, 0), mode="circular")
        return self.mix(F.gelu(self.conv(wide)))


class Emulator(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Conv2d(VARIABLES, WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.decode = nn.Conv2d(WIDTH, VARIABLES, 1)

    def forward(self, x, pad, drop_path):
        h = self.encode(x)
        for n, block in enumerate(self.blocks):
            h = h + drop_path(block(pad(h)), n)
        return self.decode(h)


def keep_mask(seeds):
    """One number per sample, from that sample's own stream."""
    draws = [torch.rand((), generator=torch.Generator().manual_seed(int(s))) for s in seeds]
    return torch.stack(draws) < KEEP


class HaloRows(torch.autograd.Function):
    @staticmethod
    def swap(rank, world, upward, downward):
        from_up, from_down = torch.zeros_like(upward), torch.zeros_like(downward)
        works = []
        if rank > 0:
            works += [dist.isend(upward.contiguous(), rank - 1), dist.irecv(from_up, rank - 1)]
        if rank < world - 1:
            works += [dist.isend(downward.contiguous(), rank + 1), dist.irecv(from_down, rank + 1)]
        for work in works:
            work.wait()
        return from_up, from_down

    @staticmethod
    def forward(fctx, x, rank, world):
        fctx.place = rank, world
        above, below = HaloRows.swap(
            rank, world, x[:, :, :1].contiguous(), x[:, :, -1:].contiguous()
        )
        return torch.cat([above, x, below], 2)

    @staticmethod
    def backward(fctx, grad):
        own = grad[:, :, 1:-1].clone()
        first, last = HaloRows.swap(
            *fctx.place, grad[:, :, :1].contiguous(), grad[:, :, -1:].contiguous()
        )
        own[:, :, :1] += first
        own[:, :, -1:] += last
        return own, None, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Emulator()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "state": torch.randn(ROWS, VARIABLES, LATITUDES, LONGITUDES, generator=g),
            "later": torch.randn(ROWS, VARIABLES, LATITUDES, LONGITUDES, generator=g),
            "sample": torch.arange(ROWS) + 40 * self.seed + 3,
        }

    @staticmethod
    def error(forecast, truth, first):
        lat = (torch.arange(truth.shape[2]) + first + 0.5) / LATITUDES - 0.5
        weight = torch.cos(lat * torch.pi).to(truth.dtype)[:, None]
        return ((forecast - truth).square() * weight).sum() / (VARIABLES * LATITUDES * LONGITUDES)

    def loss_sum(self, model, rows):
        def drop_path(x, n):
            mask = keep_mask(100 * rows["sample"] + n)
            return x * mask.to(x.dtype)[:, None, None, None] / KEEP

        forecast = model(rows["state"], lambda h: F.pad(h, (0, 0, 1, 1)), drop_path)
        return self.error(forecast, rows["later"], 0), len(forecast)

    def path_seeds(self, sample, block, ctx):
        return 100 * sample + block

    def step(self, model, batch, ctx):
        rank, world = ctx.rank, ctx.world_size
        bounds = [LATITUDES * r // world for r in range(world + 1)]
        lo, hi = bounds[rank], bounds[rank + 1]
        for p in model.parameters():
            p.grad = None
        for m in range(2):
            part = {k: v.tensor_split(2)[m] for k, v in batch.items()}

            def drop_path(x, n):
                mask = keep_mask(self.path_seeds(part["sample"], n, ctx))
                return x * mask.to(x.dtype)[:, None, None, None] / KEEP

            strip = part["state"][:, :, lo:hi]
            forecast = model(strip, lambda h: HaloRows.apply(h, rank, world), drop_path)
            (self.error(forecast, part["later"][:, :, lo:hi], lo) / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("lat"))


class Buggy(Clean):
    def path_seeds(self, sample, block, ctx):
        return 100 * sample + block + 2718 * ctx.rank


EXPECT = dict(
    right=[
        r"random|seed|rng|generator|drop.?path|stochastic depth|drop(ped|s)?\b|mask|keep|noise|draw",
        r"rank|strip|shard|latitude|across|between|differ|own|per.?rank|not the same|unlike",
    ],
    place=[
        r"path_seeds",
        r"keep_mask",
        r"drop_path|drop.?path",
        r"seed|generator",
        r"\brand\b|torch\.rand",
    ],
    wrong=[
        r"halo.{0,40}(wrong|missing|lost|dropped|not sent)|HaloRows.{0,40}(wrong|missing|adjoint)",
        r"(missing|lacks?|without|never|not) (all.?)?reduc|reduced twice",
        r"wrong divisor|divided by the (wrong|own)|mean of means|only the last micro.?batch|last micro.?batch only",
        r"latitude weight.{0,30}wrong|weights? of the own band",
    ],
)
WHY = (
    "The mask of stochastic depth belongs to a sample and a block, and the three strips of one sample have to use the same. The seed in path_seeds has 2718 times the rank added, so only rank 0 draws the masks of the single process; ranks 1 and 2 "
    "keep or drop other blocks of the same samples, in both micro-batches. Forward values, what is exchanged in the halo, and all gradients are then of another model; the collectives and divisors are right. A right cause says that the random "
    "masks (seeds) differ between the ranks that share a sample. Fix: seed by sample and block alone, with no rank in it."
)
