"""A small residual network with PEFT's Householder adapters (HRA: each adapted weight is W H1 H2 ... Hr with r reflections), trained under FSDP2 on three ranks (4, 3 and 3 of ten rows, two micro-batches,
gradients synchronised after the second; FSDP averages, so the loss carries the number of ranks). To spare the square matrices the ranks don't multiply W with them but reflect the activations, in a
forward of their own put on each adapted layer.

The bug: y = W H1 H2 ... Hr x needs x to be reflected by Hr first and by H1 last; the ranks' function goes from the first to the last. After the class of public reports about activation-side rewrites of
multiplicative adapters (HRA, OFT and BOFT in peft: order and transposition of the product) whose results differ from the merged weight.
"""

import types

import torch
from peft import HRAConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, INPUT, WIDTH, INNER, CLASSES, REFLECTIONS = 10, 6, 8, 11, 5, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(INPUT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def reflect(x, u):
    """x by the product of the reflections in the columns of u, without the product."""
    u = u / u.norm(dim=0)
    for n in reversed(range(u.shape[1])):
        x = x - 2 * (x @ u[:, n])[..., None] * u[:, n]
    return x


def reflect_in_turn(x, u):
    for axis in (u / u.norm(dim=0)).unbind(1):
        x = x - 2 * (x @ axis)[..., None] * axis
    return x


class Clean:
    reflect = staticmethod(reflect)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = HRAConfig(
            r=REFLECTIONS,
            target_modules=["up", "down"],
            init_weights=False,
            modules_to_save=["head"],
        )
        return get_peft_model(Net(), config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUT, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["label"], reduction="sum"), len(rows["label"])

    def distribute(self, model, ctx):
        reflect = self.reflect

        def by_activations(layer, x):
            base = layer.get_base_layer()
            return F.linear(
                reflect(x, layer.hra_u[layer.active_adapters[0]]), base.weight, base.bias
            )

        net = model.base_model.model
        for block in net.blocks:
            for layer in (block.up, block.down):
                layer.forward = types.MethodType(by_activations, layer)
            fully_shard(block, mesh=ctx.mesh)
        fully_shard(model, mesh=ctx.mesh)
        return model

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for n in range(2):
            model.set_requires_gradient_sync(n == 1)
            loss, _ = self.loss_sum(model, {k: v.tensor_split(2)[n] for k, v in mine.items()})
            (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    reflect = staticmethod(reflect_in_turn)


EXPECT = dict(
    right=[
        r"reflect|householder|hra|axis|axes",
        r"order|first|last|revers|sequence|in turn|transpos|commut|product|H1",
    ],
    place=[r"reflect", r"by_activations", r"\bup\b", r"\bdown\b", r"hra"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor (3|1/3)",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"backward (formula|alone) .{0,20}wrong|(wrong|other) rows",
    ],
)
WHY = (
    "reflect_in_turn reflects the activations in u's first column first and in its last column last, so it computes W Hr ... H2 H1 x where the library computes W H1 H2 ... Hr x; reflections do not commute. "
    "The outputs of all adapted layers (up and down of both blocks) are wrong in the forward, on all three ranks and in every row, and with them loss and all trained gradients (hra_u and the head). The first wrong "
    "value is the output of blocks.0.up; norm's output, its input, is right. Sharding, synchronisation and the factor 3 / 10 are right. Fix: go through the columns from the last to the first (reflect)."
)
