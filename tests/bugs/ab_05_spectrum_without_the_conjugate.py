"""Language model with two Hyena blocks (projections to value, key and gate; a long convolution over the sequence with an implicit filter, by FFT; gates), FSDP2 on three ranks (sums, no divisor), uneven rows, two micro-batches. The FFT
convolution is an own autograd.Function that keeps the input and the filter and makes the spectra anew in the backward, which saves the complex tensors.

The bug: the gradient of the input is computed with the spectrum of the filter as it is, not with its conjugate, which convolves where it should correlate: position t hears the gradients of the positions before it in place of those after it. The
gradient of the filter has its conjugate and is right. After mistakes in hand-written backwards of FFT convolutions (S4, H3 and Hyena ports).
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WORDS, WIDTH, MICRO, IGNORE = 13, 9, 23, 10, 2, -100


class LongConvolution(torch.autograd.Function):
    """y[b, t, c] = sum over s <= t of k[t - s, c] u[b, s, c]"""

    @staticmethod
    def forward(ctx, u, k, turn):
        ctx.save_for_backward(u, k)
        ctx.turn, n = turn, 2 * u.shape[1]
        y = torch.fft.irfft(torch.fft.rfft(u, n, 1) * torch.fft.rfft(k, n, 0), n, 1)
        return y[:, : u.shape[1]]

    @staticmethod
    def backward(ctx, g):
        u, k = ctx.saved_tensors
        length, n = u.shape[1], 2 * u.shape[1]
        g = torch.fft.rfft(g, n, 1)
        filter_spectrum = ctx.turn(torch.fft.rfft(k, n, 0))
        du = torch.fft.irfft(g * filter_spectrum, n, 1)[:, :length]
        dk = torch.fft.irfft((g * torch.fft.rfft(u, n, 1).conj()).sum(0), n, 0)[:length]
        return du, dk, None


class Filter(nn.Module):
    """A filter of the sequence's length from a small network of the position."""

    def __init__(self):
        super().__init__()
        self.enter, self.out = nn.Linear(5, 8), nn.Linear(8, WIDTH, bias=False)

    def forward(self, dtype):
        t = torch.linspace(0, 1, LENGTH, dtype=torch.float64)[:, None]
        bands = torch.cat([t] + [f(3.1 * b * t) for b in (1, 2) for f in (torch.sin, torch.cos)], 1)
        window = torch.exp(-2 * t)
        return self.out(torch.sin(self.enter(bands.to(dtype)))) * window.to(dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.value, self.key, self.gate = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.filter, self.skip = Filter(), nn.Parameter(torch.randn(WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 15), nn.Linear(15, WIDTH)
        self.turn = torch.conj

    def forward(self, x):
        y = self.norm(x)
        u = self.value(y) * self.key(y)
        y = LongConvolution.apply(u, self.filter(u.dtype), self.turn) + u * self.skip
        x = x + self.out(y * self.gate(self.norm(x)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Clean:
    turn = staticmethod(torch.conj)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=g)
        beyond = torch.arange(LENGTH) >= torch.randint(4, LENGTH + 1, (ROWS, 1), generator=g)
        return {"tokens": tokens[:, :-1], "next": tokens[:, 1:].masked_fill(beyond, IGNORE)}

    def loss_sum(self, model, rows):
        logits = model(rows["tokens"]).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["next"].flatten(), reduction="sum")
        return loss, int((rows["next"] != IGNORE).sum())

    def distribute(self, model, ctx):
        for block in model.blocks:
            block.turn = self.turn
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def step(self, model, batch, ctx):
        count = int((batch["next"] != IGNORE).sum())
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for m in range(MICRO):
            rows = {k: v.tensor_split(MICRO)[m] for k, v in mine.items()}
            model.set_requires_gradient_sync(m == MICRO - 1)
            (self.loss_sum(model, rows)[0] / count).backward()


class Buggy(Clean):
    turn = staticmethod(torch.resolve_conj)


EXPECT = dict(
    right=[
        r"(?i)backward|adjoint|transpos|gradient of|vjp|conjuga",
        r"(?i)convol|filter|fft|spectr|conjuga|LongConvolution|autograd\.?Function|own function|input gradient|blocks?\.1",
    ],
    place=[r"(?i)convol|LongConvolution|blocks?\.1|fft|spectr|\bvalue\b|\bkey\b"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their) own|factor of (1/)?3\b",
        r"(?i)(head|blocks\.1\.(gate|out|up|down|norm2|skip|filter[.\w]*))(\.(weight|bias))? (is|are) wrong",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
    ],
)
WHY = (
    "In the backward of LongConvolution the gradient of the input must be irfft(G conj(K)); the conjugate of the filter's spectrum is left out (resolve_conj changes nothing). The result is a causal convolution of the gradients with the "
    "filter instead of the correlation: position t gets k[t - s] g[s] of s <= t, it should get k[s - t] g[s] of s >= t. Wrong on all ranks and in all micro-batches alike; a single process running this Function is as wrong. Forward and loss "
    "are right, so is the gradient of the filter. Right: head, norm, and of blocks.1 norm2, up, down, out, gate, skip, filter. Wrong, in direction: value, key and norm of blocks.1, all of blocks.0 (its filter too, since what arrives there "
    "is wrong) and embed. FSDP's reduction, the count, the micro-batches are right. Fix: conj() of the filter's spectrum."
)
