"""Wavenet-like causal convolutions over sound, cut in time over three ranks (24 frames in shards of 8), kernel 3, dilations 1, 2 and 4. Before every convolution a rank gets the last frames of its left neighbour (an autograd Function:
frames go right, gradients come back left). Two micro-batches; the loss is a squared error per frame.

The bug: the halo has kernel - 1 frames for every layer, without the dilation; what the convolution still needs to its left is filled with zeros (as is right for the first rank). The span of a dilated kernel is (kernel - 1) *
dilation, see tenstorrent/tt-metal issue 18049 (halo size of dilated convolutions).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
ROWS, FRAMES, SHARD, CHANNELS, WIDTH = 5, 24, 8, 2, 5
KERNEL, DILATIONS = 3, (1, 2, 4)


class FromLeft(torch.autograd.Function):
    """The last `size` frames of the left neighbour's shard; zeros on the first rank."""

    @staticmethod
    def forward(ctx, x, size, group):
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        ctx.size, ctx.group, ctx.shape = size, group, x.shape
        halo, work = x.new_zeros(*x.shape[:2], size), None
        if rank + 1 < world:
            work = dist.isend(x[:, :, -size:].contiguous(), dist.get_global_rank(group, rank + 1))
        if rank:
            dist.recv(halo, dist.get_global_rank(group, rank - 1))
        if work is not None:
            work.wait()
        return halo

    @staticmethod
    def backward(ctx, grad):
        rank, world = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        back, work = grad.new_zeros(ctx.shape), None
        if rank:
            work = dist.isend(grad.contiguous(), dist.get_global_rank(ctx.group, rank - 1))
        if rank + 1 < world:
            got = torch.empty_like(grad, memory_format=torch.contiguous_format)
            dist.recv(got, dist.get_global_rank(ctx.group, rank + 1))
            back[:, :, -ctx.size :] = got
        if work is not None:
            work.wait()
        return back, None, None


class Layer(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.dilation = dilation
        self.conv = nn.Conv1d(WIDTH, 2 * WIDTH, KERNEL, dilation=dilation)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 1)
        self.group, self.plain_halo = None, False

    def forward(self, x):
        span = (KERNEL - 1) * self.dilation
        wide = x
        if self.group is not None:
            size = KERNEL - 1 if self.plain_halo else span
            wide = torch.cat([FromLeft.apply(x, size, self.group), x], 2)
        wide = F.pad(wide, (x.shape[2] + span - wide.shape[2], 0))
        gate, value = self.conv(wide).chunk(2, 1)
        return x + self.mix(torch.sigmoid(gate) * torch.tanh(value))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(CHANNELS, WIDTH, 1)
        self.layers = nn.ModuleList(Layer(d) for d in DILATIONS)
        self.head = nn.Conv1d(WIDTH, CHANNELS, 1)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Clean:
    plain_halo = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "sound": torch.randn(ROWS, CHANNELS, FRAMES, generator=g),
            "target": torch.randn(ROWS, CHANNELS, FRAMES, generator=g),
        }

    def loss_sum(self, model, rows):
        loss = (model(rows["sound"]) - rows["target"]).square().sum()
        return loss, rows["target"].numel()

    def distribute(self, model, ctx):
        for layer in model.layers:
            layer.group, layer.plain_halo = ctx.group("sp"), self.plain_halo
        return model

    def step(self, model, batch, ctx):
        mine = slice(ctx.rank * SHARD, (ctx.rank + 1) * SHARD)
        for part in (slice(0, 2), slice(2, 5)):
            shard = {k: v[part, :, mine] for k, v in batch.items()}
            (self.loss_sum(model, shard)[0] / batch["target"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("sp"))


class Buggy(Clean):
    plain_halo = True


EXPECT = dict(
    right=[
        r"(?i)layers?\W{0,2}(1|2)|second|third|dilat|halo|FromLeft|conv",
        r"(?i)forward|output|input|halo|dilat|frames?|neighbou?r|edge|border|boundar|pad|zero",
    ],
    place=[r"(?i)layers?\W{0,2}(1|2)|dilat|halo|FromLeft"],
    wrong=[
        r"(?i)forward is right|only (in )?the backward is wrong",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)(wrong|starts|begins|differs) .{0,20}(on|at) rank 0\b",
        r"(?i)(first|earliest|starts|begins) .{0,30}(stem|layers?\.0\b)",
        r"(?i)adjoint|gradients? of the halo (is|are) (wrong|lost|not)",
    ],
)
WHY = (
    "Layer 0 (dilation 1) needs 2 frames to the left and gets them. Layer 1 (dilation 2) needs 4 and gets 2 from the neighbour and 2 zeros before them; layer 2 (dilation 4) needs 8 and gets 2 and 6 zeros. On rank 0 zeros are right; "
    "ranks 1 and 2 read zeros instead of frames of the left neighbour. So the forward goes wrong first in layers.1 (its conv: frames 0 and 1 of the shard) on ranks 1 and 2, then in layers.2 (frames 0 to 5), in both micro-batches, all "
    "rows; rank 0's forward is right. The backward is the exact adjoint of this wrong forward: the gradients to the missing frames of the left neighbours (rank 0 and 1) are missing too. All parameters are wrong (head and layers.2 by "
    "other activations, layers.0, layers.1 and stem also by lost gradients), the same on all ranks after the all-reduce. FromLeft itself, divisor 240, targets and reduction are right. Fix: halo of (KERNEL - 1) * dilation frames."
)
