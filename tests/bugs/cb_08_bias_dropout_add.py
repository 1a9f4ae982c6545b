"""Pre-norm MLP blocks whose second matrix leaves its bias to a fused bias-dropout-add (Megatron-LM's skip_bias_add), an autograd Function with a backward by hand. The dropout masks come with the batch. DistributedDataParallel over three ranks, two
micro-batches, the first under no_sync.

The bug: the Function's backward sums the gradient that arrives over the tokens to get the bias' gradient, as it does for a plain addition; the bias goes through the dropout, too. After fused dropout-add kernels (xformers' FusedDropoutBias,
flash-attention's dropout_add_ln) whose bias gradient came from the wrong one of two tensors.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, TOKENS, WIDTH, INNER, BLOCKS, CLASSES, MICRO, DROP = 12, 4, 6, 9, 2, 5, 2, 0.25


class BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, bias, residual, keep):
        scaled = keep.to(x) / (1 - DROP)
        fctx.save_for_backward(scaled)
        return residual + (x + bias) * scaled

    @staticmethod
    def backward(fctx, grad):
        (scaled,) = fctx.saved_tensors
        grad_x = grad * scaled
        return grad_x, grad_x.flatten(0, -2).sum(0), grad, None


class FusedBiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, bias, residual, keep):
        scaled = keep.to(x) / (1 - DROP)
        fctx.save_for_backward(scaled)
        return torch.addcmul(residual, x + bias, scaled)

    @staticmethod
    def backward(fctx, grad):
        (scaled,) = fctx.saved_tensors
        grad_residual = grad
        grad_bias = grad_residual.flatten(0, -2).sum(0)
        return grad_residual * scaled, grad_bias, grad_residual, None


def bias_dropout_add(x, bias, residual, keep):
    return residual + (x + bias) * (keep.to(x) / (1 - DROP))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.add = bias_dropout_add

    def forward(self, x, keep):
        h = F.linear(F.gelu(self.up(self.norm(x))), self.down.weight)
        return self.add(h, self.down.bias, x, keep)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.entry = nn.Linear(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, keep):
        h = self.entry(x)
        for n, block in enumerate(self.blocks):
            h = block(h, keep[:, n])
        return self.head(h)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Mixer()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, TOKENS, CLASSES, generator=g),
            "keep": torch.rand(ROWS, BLOCKS, TOKENS, WIDTH, generator=g) >= DROP,
            "label": torch.randint(CLASSES, (ROWS, TOKENS), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["x"], rows["keep"]).flatten(0, 1)
        return F.cross_entropy(logits, rows["label"].flatten(), reduction="sum"), rows[
            "label"
        ].numel()

    def fused(self):
        return BiasDropoutAdd.apply

    def distribute(self, model, ctx):
        for block in model.blocks:
            block.add = self.fused()
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        mine = {k: x.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, x in batch.items()}
        for n in range(MICRO):
            part = {k: x.tensor_split(MICRO)[n] for k, x in mine.items()}
            last = n == MICRO - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss, _ = self.loss_sum(model, part)
                (loss * ctx.axes["dp"] / (ROWS * TOKENS)).backward()


class Buggy(Clean):
    def fused(self):
        return FusedBiasDropoutAdd.apply


EXPECT = dict(
    right=[
        r"bias",
        r"mask|drop|keep|scaled|residual|backward|autograd Function|hand.?written|derivative|adjoint|vjp|jacobian",
    ],
    place=[
        r"FusedBiasDropoutAdd",
        r"down\.bias",
        r"grad_bias|bias.{0,20}gradient|gradient.{0,20}bias",
        r"backward",
    ],
    wrong=[
        r"(missing|no|never).{0,20}all.?reduce|not reduced|reduced twice|DDP .{0,30}(not|never)",
        r"no_sync|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|divisor|mean of means",
        r"(different|other|new|own) (dropout )?masks?|random|seed|rng|recomput",
        r"forward .{0,20}(is )?wrong|wrong rows|wrong group",
    ],
)
WHY = (
    "y = residual + (x + bias) * keep / (1 - p). The gradient of the bias is therefore the sum over the tokens of grad * keep / (1 - p), but FusedBiasDropoutAdd's backward sums the plain gradient, which is the residual's, on all three ranks and in "
    "both micro-batches. Only down.bias of the two blocks is wrong, everything else is right, as is the forward. A right cause says that this Function's backward returns a wrong gradient for the bias (the dropout mask and scale are left out). "
    "Fix: sum grad * scaled."
)
