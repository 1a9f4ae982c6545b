"""Non-causal temporal convolution net over a long series cut along time over three ranks. Every convolution (kernel 3) needs one frame of each neighbour; the edges of all ranks are gathered in one
collective and each rank picks those of its left and right neighbour, with zeros where there is none. Two micro-batches, gradients summed over the ranks.

The bug: the neighbour's number is tested by its truth ("if neighbour"), and the left neighbour of rank 1 is rank 0, which is false: rank 1 pads with zeros as though the series began with it.
After halo exchanges of spatial/context parallel code in which `if rank:` / `if prev_rank:` stands for `is not None` (Python's falsy zero).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
CHANNELS, WIDTH, TIME, ROWS = 3, 5, 13, 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(CHANNELS, WIDTH, 1)
        self.convs = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3) for _ in range(2))
        self.head = nn.Conv1d(WIDTH, 1, 1)

    def forward(self, x, pad):
        h = self.stem(x)
        for conv in self.convs:
            h = h + torch.tanh(conv(pad(h)))
        return self.head(h)[:, 0]


class AllEdges(torch.autograd.Function):
    """First and last frame of every rank, [ranks, 2, rows, channels]."""

    @staticmethod
    def forward(fctx, x, group):
        fctx.group, fctx.shape = group, x.shape
        own = torch.stack([x[..., 0], x[..., -1]])
        edges = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(edges, own, group=group)
        return torch.stack(edges)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=fctx.group)
        own = grad[dist.get_rank(fctx.group)]
        out = grad.new_zeros(fctx.shape)
        out[..., 0] += own[0]
        out[..., -1] += own[1]
        return out, None


class Halo:
    def __init__(self, group):
        self.group = group
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.left = rank - 1 if rank > 0 else None
        self.right = rank + 1 if rank < size - 1 else None

    def edge_of(self, edges, neighbour, side):
        if neighbour is None:
            return torch.zeros_like(edges[0, 0])
        return edges[neighbour, side]

    def __call__(self, x):
        edges = AllEdges.apply(x, self.group)
        before = self.edge_of(edges, self.left, 1)
        after = self.edge_of(edges, self.right, 0)
        return torch.cat([before[..., None], x, after[..., None]], -1)


class NeighbourHalo(Halo):
    def edge_of(self, edges, neighbour, side):
        return edges[neighbour, side] if neighbour else torch.zeros_like(edges[0, 0])


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, CHANNELS, TIME, generator=g),
            "y": torch.randn(ROWS, TIME, generator=g),
        }

    def loss_sum(self, model, rows):
        out = model(rows["x"], lambda h: F.pad(h, (1, 1)))
        return (out - rows["y"]).square().sum(), rows["y"].numel()

    def make_halo(self, ctx):
        return Halo(ctx.group("cp"))

    def step(self, model, batch, ctx):
        halo = self.make_halo(ctx)
        own = {k: v.tensor_split(ctx.axes["cp"], -1)[ctx.coords["cp"]] for k, v in batch.items()}
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in own.items()}
            loss = (model(part["x"], halo) - part["y"]).square().sum()
            (loss / (ROWS * TIME)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("cp"))


class Buggy(Clean):
    def make_halo(self, ctx):
        return NeighbourHalo(ctx.group("cp"))


EXPECT = dict(
    right=[
        r"zero|missing|not (used|received|taken|read)|dropp|pad|ignor|lost|without|lacks|left out|discard|unused|nothing",
        r"neighbou?r|halo|edge|boundar|rank 0|left|border|context",
    ],
    place=[r"edge_of|NeighbourHalo", r"AllEdges|edges", r"rank 1", r"\bleft\b|before"],
    wrong=[
        r"parameters?.{0,30}(not reduced|reduced twice|never reduced)|missing all.?reduce of",
        r"backward of AllEdges.{0,40}wrong|right (neighbou?r|halo|edge).{0,30}(zero|missing|wrong)",
        r"counted (twice|two|three|3) times|mean of means|wrong (divisor|group)|micro.?batch.{0,30}(lost|dropped|overwritten)",
        r"rank 2.{0,40}(zero|missing) (halo|edge)",
    ],
)
WHY = (
    "Rank 1's left neighbour is rank 0, and `if neighbour` takes the number 0 for no neighbour: rank 1 pads zeros at its left border in both convolutions, where the last frame of rank 0 belongs. "
    "Rank 1's first frames (and through the second convolution two of them) are wrong, and rank 0's last frame gets no gradient through rank 1's convolutions; rank 2 with left neighbour 1 and all right halos are right. "
    "The collective itself brings the right edges to all ranks. A right cause says that rank 1 does not use (zeroes, loses) the halo of its left neighbour, rank 0. Fix: `is not None`."
)
