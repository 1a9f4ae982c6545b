"""A small HiFi-GAN generator (two transposed convolutions, kernel 4, stride 2, padding 1) fitted to waveforms by an L2 loss. The seven mel frames of an utterance are cut over three ranks in time (3, 2
and 2), each rank makes the samples of its own frames. Two micro-batches, the parameters' gradients are summed over the ranks. One sample of every strip's upsampled signal at either end belongs to the
neighbouring strip: it is sent there and added (overlap-add), and its gradient comes back the other way.

The bug: every rank calls conv_transpose1d with the layer's own padding on its strip, which crops these outer samples instead of handing them to the neighbours. After chunked / streaming vocoder reports
("clicks at chunk borders, ConvTranspose1d without overlap-add") and spatially parallel deconvolution code that only knows input halos.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"time": 3}}}}
ROWS, MELS, FRAMES, STRIDE = 5, 5, 7, 2


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.pre = nn.Conv1d(MELS, 8, 1)
        self.ups = nn.ModuleList(
            [nn.ConvTranspose1d(8, 6, 4, STRIDE, 1), nn.ConvTranspose1d(6, 4, 4, STRIDE, 1)]
        )
        self.post = nn.Conv1d(4, 1, 1)

    def forward(self, mel, upsample=None):
        x = self.pre(mel)
        for up in self.ups:
            x = F.leaky_relu(x, 0.1)
            x = up(x) if upsample is None else upsample(up, x)
        return torch.tanh(self.post(F.leaky_relu(x, 0.1)))[:, 0]


def swap_with_neighbours(to_left, to_right, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    from_left, from_right = torch.zeros_like(to_left), torch.zeros_like(to_right)
    work = []
    for peer, out, into in ((rank - 1, to_left, from_left), (rank + 1, to_right, from_right)):
        if 0 <= peer < size:
            there = dist.get_global_rank(group, peer)
            work += [dist.isend(out.contiguous(), there, group), dist.irecv(into, there, group)]
    for w in work:
        w.wait()
    return from_left, from_right


class TailExchange(torch.autograd.Function):
    @staticmethod
    def forward(fctx, left_tail, right_tail, group):
        fctx.group = group
        return swap_with_neighbours(left_tail, right_tail, group)

    @staticmethod
    def backward(fctx, grad_from_left, grad_from_right):
        back = swap_with_neighbours(grad_from_left, grad_from_right, fctx.group)
        return back[0], back[1], None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Generator()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "mel": torch.randn(ROWS, MELS, FRAMES, generator=g),
            "wave": torch.randn(ROWS, FRAMES * STRIDE**2, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["mel"]) - rows["wave"]).square().sum(), rows["wave"].numel()

    def upsample(self, layer, x, group):
        full = F.conv_transpose1d(x, layer.weight, stride=layer.stride)
        left, own, right = full[..., :1], full[..., 1:-1], full[..., -1:]
        from_left, from_right = TailExchange.apply(left, right, group)
        first, middle, last = own[..., :1], own[..., 1:-1], own[..., -1:]
        own = torch.cat([first + from_left, middle, last + from_right], -1)
        return own + layer.bias[:, None]

    def step(self, model, batch, ctx):
        group = ctx.group("time")
        frames = torch.arange(FRAMES).tensor_split(ctx.world_size)[ctx.rank]
        lo, hi = int(frames[0]), int(frames[-1]) + 1
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            mel, wave = (batch[k].tensor_split(2)[n] for k in ("mel", "wave"))
            out = model(mel[..., lo:hi], lambda layer, x: self.upsample(layer, x, group))
            target = wave[:, lo * STRIDE**2 : hi * STRIDE**2]
            ((out - target).square().sum() / batch["wave"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def upsample(self, layer, x, group):
        return F.conv_transpose1d(
            x, layer.weight, layer.bias, stride=layer.stride, padding=layer.padding
        )


EXPECT = dict(
    right=[
        r"transpos|deconv|upsampl|\bups?\b",
        r"neighbou?r|border|bound|edge|halo|overlap|tail|crop|exchange|adjacent|own (strip|shard|frames|part|slice)|between (the )?(ranks|shards|strips)|across (ranks|shards|strips)|other ranks",
    ],
    place=[
        r"upsample",
        r"conv_transpose1d|ConvTranspose",
        r"\bups\b",
        r"TailExchange|swap_with_neighbours|isend|irecv",
    ],
    wrong=[
        r"parameters?.{0,30}(not|never) reduced|missing all.?reduc",
        r"divisor|mean of means|count(ed)? (twice|of own)|own count",
        r"only the last micro.?batch|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
        r"(backward|adjoint) .{0,30}(alone|only) is wrong|forward is right",
        r"target.{0,20}(shift|wrong)",
    ],
)
WHY = (
    "Both upsampling layers: a strip of n frames gives 2n + 2 samples, of which one at either end lies in the neighbour's strip and has to be added there. The Buggy ranks crop these (padding=1 on the strip), so "
    "at the two borders between ranks the samples lack the neighbour's contribution (forward and gradient wrong on all three ranks, in every micro-batch); the middle rank at both ends. No message goes between the ranks in the "
    "forward at all. A right cause names the upsampling (transposed convolution) and that what reaches over the strip's border is missing/cropped instead of exchanged and summed. Fix: overlap-add with the neighbours."
)
