"""A pipeline of three stages, one on each rank, three micro-batches of two rows: all go forward, then all go backward, the last one first. The backward is split in two (zero bubble): first the gradients of
the inputs, that are sent on; the gradients of the linear weights are made at the end from the kept inputs and the kept output gradients. The divisor is the number of rows.

The bug: the kept inputs are taken in the order of the forward, the kept output gradients lie in the order of the backward, so the first micro-batch's input meets the last one's gradient. After zero-bubble
schedules with a store of weight gradients (WeightGradStore in sail-sg/zero-bubble, Megatron-LM and DualPipe).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, EACH, WIDTH, HIDDEN, CLASSES, STAGES = 6, 2, 5, 7, 4, 3


class InputGradientFirst(torch.autograd.Function):
    """A linear layer whose backward leaves the weight for later."""

    @staticmethod
    def forward(ctx, x, weight, store):
        ctx.save_for_backward(weight)
        ctx.store = store
        store.inputs.append(x.detach())
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        ctx.store.gradients.append(grad)
        return grad @ weight, None, None


class Store:
    def __init__(self):
        self.inputs, self.gradients = [], []


class Late(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) * 0.5)
        self.bias = nn.Parameter(torch.randn(out) * 0.3)
        self.store = None

    def forward(self, x):
        if self.store is None:
            return F.linear(x, self.weight, self.bias)
        return InputGradientFirst.apply(x, self.weight, self.store) + self.bias


class Stage(nn.Module):
    def __init__(self, out):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = Late(WIDTH, HIDDEN), Late(HIDDEN, out)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        widths = {str(n): WIDTH if n < STAGES - 1 else CLASSES for n in range(STAGES)}
        self.stages = nn.ModuleDict({n: Stage(out) for n, out in widths.items()})

    def forward(self, x):
        x = x.to(self.stages["0"].norm.weight.dtype)
        for stage in self.stages.values():
            x = stage(x)
        return x


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, WIDTH, generator=g),
            "labels": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["labels"], reduction="sum"), len(
            rows["labels"]
        )

    def distribute(self, model, ctx):
        for n in range(STAGES):
            if n != ctx.rank:
                del model.stages[str(n)]
        return model

    def pairs(self, store):
        return zip(reversed(store.inputs), store.gradients)

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        stage = model.stages[str(ctx.rank)]
        late = [stage.up, stage.down]
        for layer in late:
            layer.store = Store()
        dtype, last = stage.norm.weight.dtype, ctx.rank == STAGES - 1
        going = []
        for low in range(0, ROWS, EACH):
            x = batch["x"][low : low + EACH].to(dtype)
            if ctx.rank > 0:
                dist.recv(x := torch.empty(EACH, WIDTH, dtype=dtype), ctx.rank - 1)
                x.requires_grad_()
            y = stage(x)
            if last:
                labels = batch["labels"][low : low + EACH]
                y = F.cross_entropy(y, labels, reduction="sum") / ROWS
            else:
                dist.send(y.detach().contiguous(), ctx.rank + 1)
            going.append((x, y))
        for x, y in reversed(going):
            grad = None
            if not last:
                dist.recv(grad := torch.empty_like(y), ctx.rank + 1)
            y.backward(grad)
            if ctx.rank > 0:
                dist.send(x.grad.contiguous(), ctx.rank - 1)
        for layer in late:
            layer.weight.grad = sum(grad.T @ x for x, grad in self.pairs(layer.store))
            layer.store = None


class Buggy(Clean):
    def pairs(self, store):
        return zip(store.inputs, store.gradients)


EXPECT = dict(
    right=[
        r"up\b|down\b|weight|InputGradientFirst|pairs|Late",
        r"backward|micro.?batch|order|gradient|other (input|row|micro)|pair|exchanged|swapped|reverse|saved",
    ],
    place=[r"up\b|down\b|weight|InputGradientFirst|pairs"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"mean of (the )?means|wrong divisor|own count",
        r"wrong in (the )?forward|forward .{0,30}(is|are) wrong",
        r"(bias|norm)[^.]{0,20} (gradient )?(is|are) wrong|wrong labels|micro.?batch(es)? .{0,20}(lost|dropped|never)",
        r"only (on )?(rank|stage) [0-2]\b",
    ],
)
WHY = (
    "On all three stages up.weight.grad and down.weight.grad are the sums of gradient(2).T input(0) + gradient(1).T input(1) + gradient(0).T input(2), micro-batches 0 to 2; right is each gradient with its "
    "own micro-batch's input. The middle micro-batch's pair is right. The forward, the loss, the gradients sent between stages, the biases and the norms' gradients are right on all ranks; only the six "
    "weights are wrong. The divisor 6 and the schedule's order are right. Fix: take the kept inputs from the end, reversed(store.inputs)."
)
