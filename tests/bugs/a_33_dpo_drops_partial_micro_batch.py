"""DPO on preference pairs, in micro-batches of two pairs, gradients summed by hand. After
FAULTS class C12 (accumulation boundary; DPO trainers that floor the number of micro-
batches).
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}

ROWS, INPUTS, WIDTH, CLASSES = 10, 6, 10, 6
BETA, MICRO_BATCH_SIZE = 0.5, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        chosen = torch.randint(CLASSES, (ROWS,), generator=g)
        return {
            "prompt": torch.randn(ROWS, INPUTS, generator=g),
            "chosen": chosen,
            "rejected": (chosen + torch.randint(1, CLASSES, (ROWS,), generator=g)) % CLASSES,
            "reference_margin": torch.randn(ROWS, generator=g) / 3,
        }

    def loss_sum(self, model, rows):
        scores = model(rows["prompt"]).log_softmax(-1)
        chosen = scores.gather(1, rows["chosen"][:, None])[:, 0]
        rejected = scores.gather(1, rows["rejected"][:, None])[:, 0]
        margin = chosen - rejected - rows["reference_margin"]
        return -F.logsigmoid(BETA * margin).sum(), len(rows["prompt"])

    def mine(self, batch, ctx):
        return {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        mine = self.mine(batch, ctx)
        pairs = len(mine["prompt"])
        total = torch.tensor(pairs)
        dist.all_reduce(total)
        for i in range(self.num_micro_batches(pairs)):
            start = i * MICRO_BATCH_SIZE
            micro = {k: v[start : start + MICRO_BATCH_SIZE] for k, v in mine.items()}
            loss, _ = self.loss_sum(model, micro)
            (loss / total).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)

    def num_micro_batches(self, pairs):
        return math.ceil(pairs / MICRO_BATCH_SIZE)


class Buggy(Clean):
    def num_micro_batches(self, pairs):
        return pairs // MICRO_BATCH_SIZE


EXPECT = dict(
    right=[
        (
            r"(rows?|pairs?|micro.?batch).{0,80}(lost|missing|dropped|left out|never|not (read"
            r"|used|counted|in)|absent|zero|do(es)? not)|(lost|missing|dropped|left out|absent"
            r"|without).{0,60}(rows?|micro)"
        )
    ],
    place=[r"rows?|micro|ranks?"],
    wrong=[
        r"not reduced|never reduced|missing all.?reduce",
        r"mean of (the )?means",
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
    ],
)

WHY = (
    "The number of micro-batches is floored, so the last pair of each rank (rows 4 and 9) "
    "never reaches the backward, but is counted."
)
