"""A BigVGAN-like vocoder block cut in time: causal convolutions with a halo from the rank
before, fused Snake.

Axes dp 2 x cp 2; every cp rank holds an uneven stretch of the frames. The causal convolution gets
its left context from the previous rank (a Function that sends the gradient back). Snake, x +
sin^2(a x) / a with a = exp(alpha) per channel, is a hand-written Function that saves x and a.

The bug: the backward returns the gradient with respect to a for the parameter alpha, from the
time when the module kept a itself; alpha_logscale came later. After the alpha_logscale switch of
BigVGAN's activations and the fused kernels written for them.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "cp": 2}}}}

ROWS, TIME, WIDTH, KERNEL = 5, 11, 6, 4


class LeftContext(torch.autograd.Function):
    """The last frames of the previous rank in front of the own ones (zeros on the first rank)."""

    @staticmethod
    def forward(ctx, x, size, group):
        ctx.size, ctx.group = size, group
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        tails = [torch.empty_like(x[..., :size]) for _ in range(world)]
        dist.all_gather(tails, x[..., -size:].contiguous(), group=group)
        left = tails[rank - 1] if rank else torch.zeros_like(tails[0])
        return torch.cat([left, x], -1)

    @staticmethod
    def backward(ctx, grad):
        size, group = ctx.size, ctx.group
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        heads = [torch.empty_like(grad[..., :size]) for _ in range(world)]
        dist.all_gather(heads, grad[..., :size].contiguous(), group=group)
        out = grad[..., size:].clone()
        if rank + 1 < world:
            out[..., -size:] += heads[rank + 1]
        return out, None, None


class FusedSnake(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        a = alpha.exp()[:, None]
        ctx.save_for_backward(x, a)
        return x + torch.sin(a * x).square() / a

    @staticmethod
    def backward(ctx, grad):
        x, a = ctx.saved_tensors
        double = torch.sin(2 * a * x)
        grad_x = grad * (1 + double)
        grad_a = grad * (x * double / a - torch.sin(a * x).square() / a.square())
        return grad_x, (grad_a * a).sum((0, 2))


class FusedSnakeKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        a = alpha.exp()[:, None]
        ctx.save_for_backward(x, a)
        return x + torch.sin(a * x).square() / a

    @staticmethod
    def backward(ctx, grad):
        x, a = ctx.saved_tensors
        double = torch.sin(2 * a * x)
        grad_x = grad * (1 + double)
        grad_a = grad * (x * double / a - torch.sin(a * x).square() / a.square())
        return grad_x, grad_a.sum((0, 2))


class Snake(nn.Module):
    kernel = None

    def __init__(self, width):
        super().__init__()
        self.alpha = nn.Parameter(0.6 * torch.randn(width) - 0.3)

    def forward(self, x):
        if self.kernel is not None:
            return self.kernel(x, self.alpha)
        a = self.alpha.exp()[:, None]
        return x + torch.sin(a * x).square() / a


class CausalConv(nn.Module):
    group = None

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, KERNEL)

    def forward(self, x):
        if self.group is None:
            return self.conv(nn.functional.pad(x, (KERNEL - 1, 0)))
        return self.conv(LeftContext.apply(x, KERNEL - 1, self.group))


class Vocoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mel = CausalConv(3, WIDTH)
        self.snakes = nn.ModuleList(Snake(WIDTH) for _ in range(2))
        self.convs = nn.ModuleList(CausalConv(WIDTH, WIDTH) for _ in range(2))
        self.out = nn.Conv1d(WIDTH, 1, 1)

    def forward(self, mel):
        h = self.mel(mel)
        for snake, conv in zip(self.snakes, self.convs, strict=True):
            h = h + conv(snake(h))
        return torch.tanh(self.out(h)).squeeze(1)


def wave_loss(model, mel, wave):
    return nn.functional.smooth_l1_loss(model(mel), wave, reduction="sum", beta=0.3)


class Clean:
    kernel = FusedSnake

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 31)
        return Vocoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 32)
        return {
            "mel": torch.randn(ROWS, 3, TIME, generator=g),
            "wave": torch.rand(ROWS, TIME, generator=g) * 2 - 1,
        }

    def loss_sum(self, model, rows):
        return wave_loss(model, rows["mel"], rows["wave"]), rows["wave"].numel()

    def distribute(self, model, ctx):
        for module in model.modules():
            if isinstance(module, CausalConv):
                module.group = ctx.group("cp")
            elif isinstance(module, Snake):
                module.kernel = self.kernel.apply
        return model

    def step(self, model, batch, ctx):
        own = {k: v.tensor_split(2)[ctx.coords["dp"]] for k, v in batch.items()}
        own = {k: v.tensor_split(2, -1)[ctx.coords["cp"]] for k, v in own.items()}
        (wave_loss(model, own["mel"], own["wave"]) / batch["wave"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp", "cp"))


class Buggy(Clean):
    kernel = FusedSnakeKernel


EXPECT = dict(
    right=[
        r"alpha|snake",
        (
            r"exp|log.?scale|chain rule|factor (of )?a\b|times a\b|"
            r"derivative of (the )?(exponential|a\b)|multipl"
        ),
    ],
    place=[r"FusedSnake", r"snake", r"alpha", r"grad_a"],
    wrong=[
        r"(halo|left.?context)\S* (gradient |backward )?(is|are|sends|lacks|not)",
        r"(not|never) (reduced|summed) over (cp|the context)",
        r"1 ?/ ?a(\^2|²| squared)? (term )?(is )?(missing|left out)",
        r"sum(med)? over the wrong (dim|axis)",
    ],
)
WHY = (
    "FusedSnakeKernel.backward hands back d loss / d a where the input of the Function is alpha "
    "with a = exp(alpha): the factor a of the chain rule is left out. Only the gradients of "
    "snakes.*.alpha are wrong, each channel by its own factor exp(-alpha); the gradient with "
    "respect to x is right, and so are all convolutions, before and behind. It is the same on "
    "all ranks, and no reduction is at fault. A right cause says that the gradient of alpha "
    "lacks the exponential's derivative. The fix is (grad_a * a).sum(...)."
)
