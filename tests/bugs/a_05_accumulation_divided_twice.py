"""A training step where both the trainer and the accelerator know the accumulation steps.
After FAULTS C02-01 (accelerate issue 3533).
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}

ROWS, LENGTH, VOCABULARY, WIDTH, HEADS = 8, 5, 14, 8, 2
GRADIENT_ACCUMULATION_STEPS = 3


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Accelerator:
    def __init__(self, gradient_accumulation_steps=1):
        self.gradient_accumulation_steps = gradient_accumulation_steps

    def backward(self, loss):
        loss = loss / self.gradient_accumulation_steps
        loss.backward()


class Clean:
    accelerator = Accelerator()

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=g)
        padding = torch.arange(LENGTH) >= lengths
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(padding, -100)}

    def loss_sum(self, model, rows):
        labels = rows["labels"]
        logits = model(rows["ids"]).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def mine(self, batch, ctx):
        return {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        mine = self.mine(batch, ctx)
        num_items = (mine["labels"] != -100).sum()
        dist.all_reduce(num_items)
        steps = GRADIENT_ACCUMULATION_STEPS
        for i in range(steps):
            inputs = {k: v.tensor_split(steps)[i] for k, v in mine.items()}
            with contextlib.nullcontext() if i == steps - 1 else model.no_sync():
                self.training_step(model, inputs, num_items, ctx)

    def training_step(self, model, inputs, num_items, ctx):
        loss, _ = self.loss_sum(model, inputs)
        loss = loss * ctx.world_size / num_items
        self.accelerator.backward(loss)


class Buggy(Clean):
    accelerator = Accelerator(gradient_accumulation_steps=GRADIENT_ACCUMULATION_STEPS)


EXPECT = dict(
    right=[r"0\.333|1/3|a third|one third|micro.?batch|accumulation|number of backward"],
    place=[
        (
            r"every (rank|parameter|gradient)|all (ranks|parameters|gradients)|each rank|scale"
            r"|factor|uniform"
        )
    ],
    wrong=[
        r"not reduced|never reduced|missing all.?reduce",
        r"mean of (the )?means",
        r"rows? .{0,30}(lost|missing|dropped)",
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
    ],
)

WHY = (
    "The loss is already divided by all tokens of the step and is divided again by the three "
    "accumulation steps: one third everywhere."
)
