"""A long-convolution language model (Hyena style) with context parallelism: two data-parallel groups of two ranks that hold the halves of the sequence. For the convolution with a filter as long as the sequence, an all-to-all turns halves of the sequence with all channels into
the whole sequence with half of the channels, the product is computed by FFT, and another all-to-all turns it back. Two layers, two micro-batches, gradients summed over all four ranks.

The bug: the length of the transform is twice the length the layer saw before the exchange, i.e. once the whole sequence's, so the convolution is circular and the end of the sequence leaks into its beginning. After fftconv (fft_size = 2 * seqlen) in Hyena / Evo2 context-parallel ports.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "cp": 2}}}}
ROWS, LENGTH, VOCABULARY, WIDTH, LAYERS = 7, 10, 15, 6, 2


class Turn(torch.autograd.Function):
    """All-to-all between sequence halves with all channels and whole sequences with half the channels."""

    @staticmethod
    def forward(fctx, x, cut, join, group):
        fctx.args = (join, cut, group)
        return Turn.exchange(x, cut, join, group)

    @staticmethod
    def backward(fctx, grad):
        return Turn.exchange(grad, *fctx.args), None, None, None

    @staticmethod
    def exchange(x, cut, join, group):
        n = dist.get_world_size(group)
        pieces = torch.stack([t.contiguous() for t in x.chunk(n, cut)])
        out = torch.empty_like(pieces)
        dist.all_to_all_single(out, pieces, group=group)
        return torch.cat(list(out), join)


def fft_conv(x, kernel, size):
    """x: rows, length, channels; kernel: channels, length."""
    length = x.shape[1]
    spectrum = torch.fft.rfft(x.transpose(1, 2), n=size) * torch.fft.rfft(kernel, n=size)
    return torch.fft.irfft(spectrum, n=size)[..., :length].transpose(1, 2)


class Hyena(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, 2 * WIDTH)
        self.kernel = nn.Parameter(torch.randn(WIDTH, LENGTH) / LENGTH**0.5)
        self.skip = nn.Parameter(torch.randn(WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, conv):
        value, gate = self.project(x).chunk(2, -1)
        return x + self.out(torch.tanh(gate) * (conv(value, self.kernel) + self.skip * value))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Hyena() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, conv):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, conv)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(4, LENGTH + 1, (ROWS, 1), generator=g)
        labels = ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100)
        return {"ids": ids[:, :-1].contiguous(), "labels": labels}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], lambda x, kernel: fft_conv(x, kernel, 2 * LENGTH))
        labels = rows["labels"].flatten()
        return F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"), (labels >= 0).sum()

    def context_conv(self, ctx):
        group, rank = ctx.group("cp"), ctx.coords["cp"]

        def conv(x, kernel):
            x = Turn.apply(x, 2, 1, group)
            own = kernel.chunk(ctx.axes["cp"])[rank]
            return Turn.apply(fft_conv(x, own, 2 * x.shape[1]), 1, 2, group)

        return conv

    def step(self, model, batch, ctx):
        rows = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        mine = {k: v.chunk(ctx.axes["cp"], 1)[ctx.coords["cp"]] for k, v in rows.items()}
        count = (mine["labels"] >= 0).sum()
        dist.all_reduce(count)
        conv = self.context_conv(ctx)
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            logits = model(part["ids"], conv)
            loss = F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction="sum")
            (loss / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)


class Buggy(Clean):
    def context_conv(self, ctx):
        group, rank = ctx.group("cp"), ctx.coords["cp"]

        def conv(x, kernel):
            fft_size = 2 * x.shape[1]
            x = Turn.apply(x, 2, 1, group)
            own = kernel.chunk(ctx.axes["cp"])[rank]
            return Turn.apply(fft_conv(x, own, fft_size), 1, 2, group)

        return conv


EXPECT = dict(
    right=[
        r"fft|transform|convol|circular|wrap|alias|padd|causal|later (tokens?|positions?)|future|leak|length|size|spectrum|rfft",
        r"fft|convol|circular|wrap|alias|zero.?pad|size|length|leak|future|later|local|own (part|half|length)|half|short",
    ],
    place=[
        r"fft_conv|fft_size|rfft",
        r"context_conv|\bconv\b",
        r"kernel|convolution|spectrum",
        r"Turn",
    ],
    wrong=[
        r"all.?reduce.{0,40}(missing|twice|wrong)|not reduced|reduced twice",
        r"(all.?to.?all|Turn).{0,60}(wrong (order|dim)|backward|transposed|missing)|wrong channels|kernel.{0,30}(wrong rank|other rank|wrong channels)",
        r"divisor|token count|mean of means|own count|labels.{0,20}(shift|wrong)",
        r"last micro.?batch|overwritten|wrong rows|conjugate",
    ],
)
WHY = (
    "fft_size is computed from the half sequence that the layer holds before the all-to-all (2 * 5 = 10) and used for the whole sequence of ten positions, which needs 20: the convolution is circular, so every position hears the later ones through the kernel's wrap-around. Forward and gradients are wrong on all four ranks in both layers "
    "and both micro-batches; the exchanges, the kernels' channels, the count and the sums are right. A right cause says that the FFT / convolution is too short (local length, circular, not zero-padded). Fix: twice the length after the exchange."
)
