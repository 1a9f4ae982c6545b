"""A fused RMSNorm with a hand-written backward, in a model under FSDP2.
After reports on Triton/Liger norm kernels whose backward forgets the weight in one term."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, WIDTH, HIDDEN = 10, 9, 14


class FusedRms(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, right):
        scale = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        ctx.save_for_backward(x * scale, weight, scale)
        ctx.right = right
        return x * scale * weight

    @staticmethod
    def backward(ctx, grad):
        unit, weight, scale = ctx.saved_tensors
        through = grad * weight
        along = ((through if ctx.right else grad) * unit).mean(-1, keepdim=True)
        return scale * (through - unit * along), (grad * unit).flatten(0, -2).sum(0), None


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.5 * torch.randn(width))
        self.fused = None

    def forward(self, x):
        if self.fused is not None:
            return FusedRms.apply(x, self.weight, self.fused)
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate = RMSNorm(WIDTH), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Clean:
    right = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {"x": torch.randn(ROWS, 5, generator=g), "y": torch.randn(ROWS, 3, generator=g)}

    def loss_sum(self, model, rows):
        return (model(rows["x"]) - rows["y"]).square().sum(), len(rows["x"])

    def distribute(self, model, ctx):
        for layer in model.layers:
            layer.norm.fused = self.right
        for module in (*model.layers, model):
            fully_shard(module, mesh=ctx.mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / ROWS).backward()


class Buggy(Clean):
    right = False


EXPECT = dict(
    right=[r"backward", r"layers\.[01](\.norm)?|norm"],
    place=[r"layers\.1\.norm", r"layers\.[01]"],
    wrong=[
        r"averag",
        r"counted twice",
        r"never reduced|not reduced|missing reduction",
        r"\bforward (is )?wrong",
    ],
)
WHY = (
    "The hand-written backward of the norms in layers.0 and layers.1 leaves the weight out of the "
    "projection term: the input gradient is wrong from layers.1.norm downward, forward right."
)
