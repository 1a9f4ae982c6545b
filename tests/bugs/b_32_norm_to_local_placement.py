"""Sequence-sharded activations with a replicated DTensor norm weight, used as a local tensor.
After FAULTS C07-10: a bare to_local() says the gradient is replicated, though it is partial."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, LENGTH, WIDTH, CLASSES = 6, 9, 10, 4


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(WIDTH) / 4)
        self.grad_placements = None

    def forward(self, x):
        weight = self.weight
        if isinstance(weight, DTensor):
            weight = weight.to_local(grad_placements=self.grad_placements)
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ffn_norm = Norm()
        self.w1, self.w2 = nn.Linear(WIDTH, 12, bias=False), nn.Linear(12, WIDTH, bias=False)

    def forward(self, x):
        return x + self.w2(F.silu(self.w1(self.ffn_norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.layers = nn.Sequential(Block(), Block())
        self.norm, self.output = Norm(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.output(self.norm(self.layers(self.stem(x))))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, LENGTH, 5, generator=g),
            "y": torch.randint(CLASSES, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows):
        logits, labels = model(rows["x"]).flatten(0, 1), rows["y"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()

    def placements(self):
        return [Partial()]

    def distribute(self, model, ctx):
        for module in model.modules():
            if isinstance(module, Norm):
                module.grad_placements = self.placements()
                weight = distribute_tensor(module.weight.detach(), ctx.mesh, [Replicate()])
                module.weight = nn.Parameter(weight)
        return model

    def step(self, model, batch, ctx):
        at, size = ctx.coords["tp"], ctx.axes["tp"]
        mine = {k: v.chunk(size, dim=1)[at] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / batch["y"].numel()).backward()
        for param in model.parameters():
            if isinstance(param, DTensor):
                param.grad = param.grad.redistribute(placements=param.placements)
            else:
                dist.all_reduce(param.grad, group=ctx.group("tp"))


class Buggy(Clean):
    def placements(self):
        return None


EXPECT = dict(
    right=[
        r"norm",
        r"not (summed|reduced)|never (summed|reduced)|missing.*(reduc|sum)|own (part|share)|partial"
        r"|unreduced|lacks?.*(reduc|sum)|left out|own (rows|columns|positions)",
    ],
    place=[r"ffn_norm", r"norm\.weight"],
    wrong=[r"averag", r"counted (twice|3 times)", r"\bforward (is )?wrong"],
)
WHY = (
    "The norms' replicated DTensor weights are taken by a bare to_local(); the partial gradient "
    "of each rank's positions passes for complete and is never reduced over tp."
)
