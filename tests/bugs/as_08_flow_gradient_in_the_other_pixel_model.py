"""Image registration (VoxelMorph-like) under DDP on two ranks, two micro-batches each of uneven size (no_sync for the first): one network predicts a flow from both images, another computes features of the moving image, the features are
warped by the flow with an own bilinear sampler (autograd Function, pixel model align_corners=False) and turned into the fixed image. Sum of squared errors / pixels of all ranks.

The bug: the sampler's backward turns the gradient per pixel into one per normalised coordinate with (size - 1) / 2, the factor of align_corners=True, while the forward uses size / 2. As in ooples/AiDotNet.Tensors PR 582 (grid-sample
backward uses the wrong normalised-coordinate convention), compare NVlabs/stylegan3 issue 220 and pytorch/pytorch issue 20785 (grid_sample is not aligned).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, HEIGHT, BREADTH, CHANNELS = 7, 4, 7, 3
PARTS = [[(0, 2), (2, 3)], [(3, 5), (5, 7)]]


def corners(image, x, y):
    """The four neighbours of the pixel coordinates: index, values, side in x and in y."""
    height, breadth = image.shape[-2:]
    for right in (0, 1):
        for below in (0, 1):
            i, j = x.floor().long() + right, y.floor().long() + below
            inside = (i >= 0) & (i < breadth) & (j >= 0) & (j < height)
            index = j.clamp(0, height - 1) * breadth + i.clamp(0, breadth - 1)
            index = index.flatten(1)[:, None].expand(-1, image.shape[1], -1)
            inside = inside.flatten(1)[:, None].to(image.dtype)
            value = image.flatten(2).gather(2, index) * inside
            wx, wy = (x - x.floor()).flatten(1)[:, None], (y - y.floor()).flatten(1)[:, None]
            wx, sx = (wx, 1.0) if right else (1 - wx, -1.0)
            wy, sy = (wy, 1.0) if below else (1 - wy, -1.0)
            yield index, inside, value, wx, wy, sx, sy


class Warp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, image, grid, aligned):
        height, breadth = image.shape[-2:]
        x = ((grid[..., 0] + 1) * breadth - 1) / 2
        y = ((grid[..., 1] + 1) * height - 1) / 2
        ctx.save_for_backward(image, x, y)
        ctx.aligned = aligned
        out = sum(value * wx * wy for _, _, value, wx, wy, _, _ in corners(image, x, y))
        return out.unflatten(2, grid.shape[1:3])

    @staticmethod
    def backward(ctx, grad):
        image, x, y = ctx.saved_tensors
        height, breadth = image.shape[-2:]
        grad = grad.flatten(2)
        dimage = torch.zeros_like(image).flatten(2)
        dx, dy = torch.zeros_like(x).flatten(1), torch.zeros_like(y).flatten(1)
        for index, inside, value, wx, wy, sx, sy in corners(image, x, y):
            dimage.scatter_add_(2, index, grad * inside * wx * wy)
            dx += (grad * value * sx * wy).sum(1)
            dy += (grad * value * wx * sy).sum(1)
        less = 1 if ctx.aligned else 0
        dgrid = torch.stack([dx * (breadth - less) / 2, dy * (height - less) / 2], -1)
        return dimage.view_as(image), dgrid.view(*x.shape, 2), None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.flow = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1), nn.SiLU(), nn.Conv2d(6, 2, 3, padding=1), nn.Tanh()
        )
        self.features = nn.Sequential(nn.Conv2d(1, CHANNELS, 3, padding=1), nn.SiLU())
        self.out = nn.Conv2d(CHANNELS, 1, 1)
        self.own, self.aligned = False, False

    def forward(self, moving, fixed):
        step = moving.new_tensor([2 / BREADTH, 2 / HEIGHT])
        x = (torch.arange(BREADTH, dtype=moving.dtype) * 2 + 1) / BREADTH - 1
        y = (torch.arange(HEIGHT, dtype=moving.dtype) * 2 + 1) / HEIGHT - 1
        place = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)
        grid = place + step * 1.5 * self.flow(torch.cat([moving, fixed], 1)).permute(0, 2, 3, 1)
        features = self.features(moving)
        if self.own:
            return self.out(Warp.apply(features, grid, self.aligned))
        return self.out(F.grid_sample(features, grid, align_corners=False))


def photometric(model, rows):
    return (model(rows["moving"], rows["fixed"]) - rows["fixed"]).square().sum()


class Clean:
    aligned = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "moving": torch.randn(ROWS, 1, HEIGHT, BREADTH, generator=g),
            "fixed": torch.randn(ROWS, 1, HEIGHT, BREADTH, generator=g),
        }

    def loss_sum(self, model, rows):
        return photometric(model, rows), rows["fixed"].numel()

    def distribute(self, model, ctx):
        model.own, model.aligned = True, self.aligned
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = photometric(model, rows)
                (loss * ctx.world_size / batch["fixed"].numel()).backward()


class Buggy(Clean):
    aligned = True


EXPECT = dict(
    right=[
        r"(?i)flow|warp|grid|sampl",
        r"(?i)backward|adjoint|gradient (of|at|that|with respect|into|through)"
        r"|hands? (back|on)|factor|scal",
        r"(?i)wrong|differ|scal|factor|too small|shrunk|smaller|not the|deviat|convention",
    ],
    place=[r"(?i)flow|warp|grid|sampler"],
    wrong=[
        r"(?i)forward (is|goes|was) wrong|goes wrong in the forward",
        r"(?i)(features|out)\S*(weight|bias) (is|are) wrong",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|no_sync.{0,40}(wrong|missing)",
        r"(?i)(only|just) (on )?rank [01]\b|rank [01] alone",
        r"(?i)detached|no gradient (reaches|arrives)|cut off",
    ],
)
WHY = (
    "The forward is right on both ranks. In Warp.backward the gradient of the image is right; the gradient of the grid is multiplied by (7 - 1) / 2 instead of 7 / 2 in x and by (4 - 1) / 2 instead of 4 / 2 in y, so the flow's x "
    "channel gets 6/7 and its y channel 3/4 of its gradient. All rows, micro-batches and ranks. flow.2 (the last convolution): weight and bias of output channel 0 are scaled by 6/7, of channel 1 by 3/4; flow.0 gets a mixture of both, "
    "wrong in direction. features and out are right. Reduction, divisor 196 and no_sync are right. Fix: size / 2 in both directions, as in the forward."
)
