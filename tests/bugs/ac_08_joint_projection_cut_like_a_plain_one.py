"""Denoiser with the single-stream blocks of FLUX (attention and MLP side by side, as in ViT-22B and GPT-J, with one projection of both: proj_out(cat([attention, mlp]))), tensor parallel by hand over three ranks: a rank has one head and a third of the MLP, and of proj_out the columns that belong to them. Two micro-batches.

The bug: the columns of proj_out are cut in three equal ranges, as those of any row parallel layer. Its input on a rank is [own head, own third of the MLP], but a range of columns holds all heads' columns before it comes to the MLP's. The shapes agree. Origin: tensor parallelism for FLUX in xDiT, ParaAttention, diffusers and others, which have to rearrange
the weight of proj_out first; reported as noise for images, and silent in training from the start.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
WIDTH, HEADS, INNER, PATCHES, CHANNELS, ROWS, MICRO = 12, 3, 18, 7, 5, 7, 2


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class SingleBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.modulation = nn.Linear(WIDTH, 3 * WIDTH)
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, INNER)
        self.proj_out = nn.Linear(WIDTH + INNER, WIDTH)
        self.group = None

    def forward(self, x, time):
        shift, scale, gate = self.modulation(F.silu(time))[:, None].chunk(3, -1)
        h = self.norm(x) * (1 + scale) + shift
        if self.group is not None:
            h = Copy.apply(h, self.group)
        d = WIDTH // HEADS
        q, k, v = (f(h).unflatten(-1, (-1, d)).transpose(1, 2) for f in (self.q, self.k, self.v))
        attention = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        both = torch.cat([attention, F.gelu(self.up(h), approximate="tanh")], -1)
        out = F.linear(both, self.proj_out.weight)
        if self.group is not None:
            out = Sum.apply(out, self.group)
        return x + gate * (out + self.proj_out.bias)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.time = nn.Linear(CHANNELS, WIDTH), nn.Linear(1, WIDTH)
        self.place = nn.Parameter(torch.randn(PATCHES, WIDTH) * 0.3)
        self.blocks = nn.ModuleList(SingleBlock() for _ in range(2))
        self.leave = nn.Linear(WIDTH, CHANNELS)

    def forward(self, x, t):
        time = self.time(t[:, None])
        x = self.enter(x) + self.place
        for block in self.blocks:
            x = block(x, time)
        return self.leave(x)


def columns_in_parts(weight, rank, size):
    """The columns of the own heads, then those of the own part of the MLP."""
    attention, mlp = weight.split([WIDTH, INNER], 1)
    return torch.cat([attention.chunk(size, 1)[rank], mlp.chunk(size, 1)[rank]], 1)


def columns_in_one(weight, rank, size):
    return weight.chunk(size, 1)[rank]


class Clean:
    columns = staticmethod(columns_in_parts)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Denoiser()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        image, noise = torch.randn(2, ROWS, PATCHES, CHANNELS, generator=g)
        return {"image": image, "noise": noise, "t": torch.rand(ROWS, generator=g)}

    def loss_sum(self, model, rows):
        """Rectified flow: the velocity at a point between image and noise."""
        t = rows["t"]
        x = torch.lerp(rows["image"], rows["noise"], t[:, None, None])
        error = model(x, t) - (rows["noise"] - rows["image"])
        return error.square().sum(), error.numel()

    def distribute(self, model, ctx):
        for block in model.blocks:
            block.group = ctx.group("tp")
            for layer in (block.q, block.k, block.v, block.up):
                for name in ("weight", "bias"):
                    whole = getattr(layer, name).detach()
                    own = whole.chunk(ctx.world_size)[ctx.rank].clone()
                    setattr(layer, name, nn.Parameter(own))
            own = self.columns(block.proj_out.weight.detach(), ctx.rank, ctx.world_size)
            block.proj_out.weight = nn.Parameter(own.clone())
        return model

    def step(self, model, batch, ctx):
        for m in range(MICRO):
            rows = {k: v.tensor_split(MICRO)[m] for k, v in batch.items()}
            loss, _ = self.loss_sum(model, rows)
            (loss / batch["image"].numel()).backward()


class Buggy(Clean):
    columns = staticmethod(columns_in_one)


EXPECT = dict(
    right=[
        r"(?i)proj_out|forward|blocks\.0|columns?|cut|shard",
        r"(?i)columns?|cut|layout|order|shard|slice|range|rearrang|interleav|forward|first wrong",
    ],
    place=[r"(?i)proj_out|blocks\.0"],
    wrong=[
        r"(?i)forward (is|values? (are|is)) right|forward .{0,12}agrees",
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their|the) (own|number)|wrong normali[sz]er",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)(goes wrong in|first wrong) .{0,40}blocks\.0\.(q|k|v|up|norm|modulation)\b",
        r"(?i)backward of \S+ is wrong|wrong adjoint",
        r"(?i)targets? (is|are) (wrong|other)|noise (is|are) (drawn|other)",
    ],
)
WHY = (
    "proj_out has 30 columns, 12 of the heads (4 each) and 18 of the MLP. A rank's input is [its head: 4, its third of the MLP: 6]; it needs columns 4r..4r+3 and 12+6r..12+6r+5. The bug gives it 10r..10r+9. Rank 0 multiplies its MLP part by columns of the heads 1 and 2 (4 to 9), its head is right; rank 1 has 10..19 (its head on columns 10 to 13, its MLP on 14 to 19); rank 2 has 20..29 (head on MLP columns 20 to 23, "
    "its MLP part 24..29, which are right). The forward goes wrong in blocks.0 at proj_out (its sum over ranks), on all ranks alike; q, k, v, up, the attention and the modulation of blocks.0 are right before. The loss is wrong and all gradients with it, on all ranks. Copy, sum, divisor, micro-batches are right. "
    "Fix: cut the columns of the heads and those of the MLP separately."
)
