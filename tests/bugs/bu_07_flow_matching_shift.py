"""Flow matching with a small diffusion transformer, the image tokens cut over three ranks (4, 3 and 3 of 10), keys and values gathered for attention. As with FLUX and SD3, the noise level is shifted by the number of image tokens:
mu runs linearly between two lengths, sigma = e^mu / (e^mu + 1/t - 1). Two micro-batches, gradients summed over the ranks.

The bug: calculate_shift gets the length of the rank's own part of the tokens, and the ranks noise their tokens at lower levels, and tell the model so, than the whole image's length demands. After diffusers' calculate_shift(image_seq_len) called
on latents that had been sharded for Ulysses/ring attention before.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
ROWS, TOKENS, CHANNELS, WIDTH, HEADS = 5, 10, 3, 8, 2


def calculate_shift(image_seq_len, base_seq_len=2, max_seq_len=12, base_shift=0.5, max_shift=1.8):
    m = (max_shift - base_shift) / (max_seq_len - base_seq_len)
    return m * image_seq_len + base_shift - m * base_seq_len


def time_shift(mu, t):
    factor = torch.tensor(mu, dtype=t.dtype).exp()
    return factor / (factor + (1 / t - 1))


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, lo, group):
        fctx.place, fctx.group = slice(lo, lo + x.shape[1]), group
        full = x.new_zeros(x.shape[0], TOKENS, x.shape[2])
        full[:, fctx.place] = x
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(fctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad[:, fctx.place], None, None


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(CHANNELS, WIDTH)
        self.place = nn.Parameter(0.3 * torch.randn(TOKENS, WIDTH))
        self.time = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.final = nn.Linear(WIDTH, CHANNELS)

    def forward(self, x, sigma, places, gather):
        shift, scale = self.time(sigma[:, None])[:, None].chunk(2, -1)
        h = self.embed(x) + self.place[places]
        y = self.norm(h) * (1 + scale) + shift
        k, v = gather(self.kv(y)).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q(y), k, v))
        a = (q @ k.transpose(2, 3) / (WIDTH // HEADS) ** 0.5).softmax(-1) @ v
        return self.final(F.silu(h + self.out(a.transpose(1, 2).flatten(2))))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Transformer()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "latents": torch.randn(ROWS, TOKENS, CHANNELS, generator=g),
            "noise": torch.randn(ROWS, TOKENS, CHANNELS, generator=g),
            "t": 0.1 + 0.8 * torch.rand(ROWS, generator=g),
        }

    def flow_loss(self, model, rows, sigma, places, gather):
        s = sigma[:, None, None]
        x = (1 - s) * rows["latents"] + s * rows["noise"]
        target = rows["noise"] - rows["latents"]
        return (model(x, sigma, places, gather) - target).square().sum()

    def loss_sum(self, model, rows):
        sigma = time_shift(calculate_shift(TOKENS), rows["t"])
        loss = self.flow_loss(model, rows, sigma, torch.arange(TOKENS), lambda x: x)
        return loss, rows["latents"].numel()

    def noise_levels(self, part, ctx):
        length = torch.tensor(part["latents"].shape[1])
        dist.all_reduce(length, group=ctx.group("sp"))
        return time_shift(calculate_shift(int(length)), part["t"])

    def step(self, model, batch, ctx):
        group = ctx.group("sp")
        places = torch.arange(TOKENS).tensor_split(ctx.world_size)[ctx.rank]
        lo = int(places[0])
        model.zero_grad()
        for n in range(2):
            rows = {k: v.tensor_split(2)[n] for k, v in batch.items()}
            part = {k: v if k == "t" else v[:, places] for k, v in rows.items()}
            sigma = self.noise_levels(part, ctx)
            loss = self.flow_loss(
                model, part, sigma, places, lambda x: GatherTokens.apply(x, lo, group)
            )
            (loss / batch["latents"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def noise_levels(self, part, ctx):
        image_seq_len = part["latents"].shape[1]
        return time_shift(calculate_shift(image_seq_len), part["t"])


EXPECT = dict(
    right=[
        r"shift|sigma|noise.?level|length|tokens|time_shift|seq_len|schedule",
        r"own|local|shard|part|each rank|per rank|whole|global|miss.{0,60}(all.?reduce|collective|sum)|(all.?reduce|collective|sum|reduction).{0,60}(miss|absent|lacks?|fewer|not|never)",
    ],
    place=[r"noise_levels", r"calculate_shift", r"sigma", r"image_seq_len|length", r"time_shift"],
    wrong=[
        r"parameters?.{0,30}(not reduced|never reduced|reduced twice)|reduced (twice|again)",
        r"micro.?batch.{0,30}(lost|dropped|overwritten)|mean of means|divisor|normali[sz]er",
        r"positions? .{0,30}(from zero|restart)|GatherTokens.{0,50}(wrong|missing)|random numbers differ",
    ],
)
WHY = (
    "The shift mu of the noise level depends on the number of tokens of the whole image, 10; noise_levels takes the number of the rank's own part (4, 3, 3). All three ranks noise their tokens with a sigma that is too low, and not the same on rank 0 as on "
    "the others, and condition the model on it; input, condition and, through the gathered keys and values, everything else is wrong, in both micro-batches. Noise, targets, positions, divisor and reductions are right. "
    "A right cause says that the noise level/shift is computed from the rank's own number of tokens instead of the whole sequence's. Fix: sum the lengths over the sp group (or compute sigma before the cut)."
)
