"""LoRA fine-tuning: adapters of attention and MLP beside a trained head, under DDP. After
FAULTS C05-14 (FastVideo PR 1666).
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, INPUTS, WIDTH, CLASSES, RANK = 8, 6, 10, 5, 2


class Adapted(nn.Module):
    """A frozen linear layer and its low-rank adapter."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora = nn.Sequential(
            nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)
        )

    def forward(self, x):
        return self.base(x) + self.lora(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = Adapted(WIDTH, 2 * WIDTH), Adapted(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(INPUTS, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["x"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def mine(self, batch, ctx):
        return {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        loss, _ = self.loss_sum(model, self.mine(batch, ctx))
        (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    def distribute(self, model, ctx):
        layers = [m for m in model.modules() if isinstance(m, Adapted)]
        adapters = [layer.lora for layer in layers]
        for layer in layers:
            layer.lora = None
        wrapped = DistributedDataParallel(model)
        for layer, adapter in zip(layers, adapters, strict=True):  # inject the adapters
            layer.lora = adapter
        return wrapped


EXPECT = dict(
    right=[
        (
            r"not reduced|never reduced|not summed|never summed|missing.{0,40}(reduc|sum)"
            r"|unreduced|without (a |the |any )?(reduc|all.?reduce|sum)|own (part|share|rows"
            r"|contribution)|partial|no (reduc|all.?reduce|collective)|lacks? .{0,60}(rank"
            r"|part|sum|reduc)|only (its|their|the) own|(reduction|all.?reduce"
            r"|sum).{0,40}(missing|left out|skipped|absent)|stays? local|local to (each|its)"
            r"|out of the reduc"
        ),
        r"lora",
    ],
    place=[r"lora"],
    wrong=[
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
        r"head\.(weight|bias).{0,30}wrong",
        r"mean of (the )?means",
    ],
)

WHY = (
    "The lora adapters are added after DDP has collected its parameters, so their gradients "
    "stay local to each rank."
)
