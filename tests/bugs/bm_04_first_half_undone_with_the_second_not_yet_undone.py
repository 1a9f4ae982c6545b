"""An image classifier with three reversible residual blocks (two halves of three channels, a convolution and tanh for each half's function) on four data parallel ranks, nine images (3, 2, 2 and 2),
two micro-batches. The model itself runs the blocks under autograd; the step keeps only the output of the last block and takes the blocks' inputs back from it in a backward of its own. Gradients are
summed over the ranks by hand.

The bug: to take back y1 = x1 + f(x2), y2 = x2 + g(y1), x2 = y2 - g(y1) must be found first and then x1 = y1 - f(x2); the step evaluates f at y2, so both the derivative of f and the x1 that goes to the
blocks below are wrong. After questions and reports on RevNet and Reformer re-implementations whose loss is right and whose gradients drift with depth.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
HALF, SIDE, BLOCKS, CLASSES, ROWS = 3, 5, 3, 4, 9


def mixer():
    return nn.Sequential(nn.Conv2d(HALF, HALF, 3, padding=1), nn.Tanh(), nn.Conv2d(HALF, HALF, 1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = mixer()
        self.g = mixer()

    def forward(self, x1, x2):
        y1 = x1 + self.f(x2)
        return y1, x2 + self.g(y1)


class ReversibleNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 2 * HALF, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(2 * HALF * 4, CLASSES)

    def classify(self, x):
        return self.head(F.adaptive_avg_pool2d(torch.tanh(x), 2).flatten(1))

    def forward(self, image):
        x1, x2 = self.stem(image).chunk(2, 1)
        for block in self.blocks:
            x1, x2 = block(x1, x2)
        return self.classify(torch.cat([x1, x2], 1))


def pull(function, at, grad):
    """The value of function at a point, and grad pulled back to the point and to function's parameters."""
    with torch.enable_grad():
        at = at.detach().requires_grad_()
        value = function(at)
        back, *weights = torch.autograd.grad(value, [at, *function.parameters()], grad)
    return value.detach(), back, weights


class WithoutActivations(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, blocks, undo, *parameters):
        x1, x2 = x.chunk(2, 1)
        for block in blocks:
            x1, x2 = block(x1, x2)
        ctx.blocks, ctx.undo = blocks, undo
        y = torch.cat([x1, x2], 1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        y1, y2 = y.chunk(2, 1)
        d1, d2 = grad.chunk(2, 1)
        weights = []
        for block in reversed(ctx.blocks):
            y1, y2, d1, d2, own = ctx.undo(block, y1, y2, d1, d2)
            weights = own + weights
        return torch.cat([d1, d2], 1), None, None, *weights


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return ReversibleNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(ROWS, 2, SIDE, SIDE, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["image"]), rows["label"], reduction="sum"), len(
            rows["label"]
        )

    def undo(self, block, y1, y2, d1, d2):
        """Inputs of a block from its outputs, and the gradients of both and of the block's parameters."""
        g, back, g_weights = pull(block.g, y1, d2)
        x2, d1 = y2 - g, d1 + back
        f, back, f_weights = pull(block.f, x2, d1)
        return y1 - f, x2, d1, d2 + back, f_weights + g_weights

    def logits(self, model, image):
        parameters = [p for block in model.blocks for p in block.parameters()]
        return model.classify(
            WithoutActivations.apply(model.stem(image), list(model.blocks), self.undo, *parameters)
        )

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for n in range(2):
            image, label = mine["image"].tensor_split(2)[n], mine["label"].tensor_split(2)[n]
            loss = F.cross_entropy(self.logits(model, image), label, reduction="sum")
            (loss / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def undo(self, block, y1, y2, d1, d2):
        g, back, g_weights = pull(block.g, y1, d2)
        d1 = d1 + back
        f, back, f_weights = pull(block.f, y2, d1)
        return y1 - f, y2 - g, d1, d2 + back, f_weights + g_weights


EXPECT = dict(
    right=[
        r"WithoutActivations|undo|pull|custom (autograd )?function|autograd\.Function|reversib|recomput|reconstruct|invers|blocks?\b",
        r"backward|gradient|derivative|recomput|reconstruct|invers|adjoint|vjp",
    ],
    place=[r"WithoutActivations", r"undo", r"pull", r"blocks?(\.\d)?", r"reversib"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"(stem|head) .{0,30}(backward formula|computes wrong)|(the )?loss (value )?(itself )?(is|differs|was) (wrong|differ)|forward (pass )?is wrong",
    ],
)
WHY = (
    "Buggy.undo evaluates block.f at y2, the block's second output, where it needs the second input x2 = y2 - g(y1), which it works out only in the return. The derivative of f is then taken at the wrong point, and "
    "x1 = y1 - f(y2) is not the input that the forward saw, so that all blocks below are differentiated at wrong points too. The forward and the loss are right on all four ranks and in both micro-batches; the "
    "gradients of head and of block 2's g are right; those of block 2's f, of blocks 1 and 0 and of the stem are wrong, on all ranks. The sum over the ranks and the divisor 9 are right. Fix: find x2 first, "
    "and evaluate f there."
)
