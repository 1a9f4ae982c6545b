"""A loss normalised by this GPU's share of the items, because DDP averages over the GPUs.
After FAULTS C03-01 (transformers PR 40610: wrong number of tokens per GPU): the share is rounded down."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
ROWS, LENGTH, VOCAB, WIDTH, HEADS = 9, 5, 19, 10, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(-2))
        return x + self.out(F.gelu(self.fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.T


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return GPT()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        labels = ids[:, 1:].clone()
        prompt = torch.randint(2, LENGTH, (ROWS, 1), generator=g)
        labels[torch.arange(LENGTH) < prompt] = -100
        labels[0, -1] = labels[1, -1] = -100
        return {"input_ids": ids[:, :-1], "labels": labels}

    def loss_sum(self, model, rows):
        logits, labels = model(rows["input_ids"]).flatten(0, 1), rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        num_items = (mine["labels"] != -100).sum()
        dist.all_reduce(num_items)
        loss, _ = self.loss_sum(model, mine)
        (loss / self.items_per_gpu(num_items, ctx.world_size)).backward()

    def items_per_gpu(self, num_items, gpus):
        return num_items / gpus


class Buggy(Clean):
    def items_per_gpu(self, num_items, gpus):
        return num_items // gpus


EXPECT = dict(
    right=[
        (r"1\.12|1\.13|9/8|9 ?/ ?8|12\.5|\b16\b|truncat|floor|round|integer|whole"),
        r"scale|factor|times|too (large|big|much|small)|larger|divi|count|normali[sz]|denominator",
    ],
    place=[
        (
            r"every (rank|parameter|gradient)|all (the )?(ranks|parameters|gradients|rows)|each rank"
            r"|uniform|scale|factor|divisor|count|denominator|normali[sz]"
        )
    ],
    wrong=[
        r"gradients? (is|are|was|were) (not|never) (all-)?reduced|missing all.?reduce|never reduced",
        r"mean of (the )?means",
        r"rows? (is|are|was|were) (lost|missing|dropped)",
        r"(reduced|counted|divided) (twice|again)",
        r"(own|local) (count|number of tokens)",
    ],
)
WHY = (
    "The global item count is divided by the number of GPUs with integer division, so the divisor "
    "is too small by the remainder: every gradient is too large by the same factor, N/4 over floor(N/4)."
)
