"""A loss divided by the item count of all GPUs, then averaged by DDP. After FAULTS C03-01
(transformers PR 40610, issue 37474).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, LENGTH, VOCABULARY, WIDTH, HEADS = 7, 5, 14, 8, 2


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
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Clean:
    average_tokens_across_devices = True

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
        inputs = self.mine(batch, ctx)
        loss = self.compute_loss(model, inputs, self.get_num_items(inputs), ctx)
        loss.backward()

    def get_num_items(self, inputs):
        num_items = (inputs["labels"] != -100).sum()
        if self.average_tokens_across_devices:
            dist.all_reduce(num_items)
        return num_items

    def compute_loss(self, model, inputs, num_items, ctx):
        loss, _ = self.loss_sum(model, inputs)
        loss = loss / num_items
        if self.average_tokens_across_devices:
            loss = loss * ctx.world_size
        return loss


class Buggy(Clean):
    def compute_loss(self, model, inputs, num_items, ctx):
        loss, _ = self.loss_sum(model, inputs)
        return loss / num_items


EXPECT = dict(
    right=[
        (
            r"0\.333|1/3|a third|one third|size of|world|1 / ?(dp|3)|averag|number of ranks"
            r"|once more"
        )
    ],
    place=[
        (
            r"every (rank|parameter|gradient)|all (ranks|parameters|gradients)|\bdp\b|scale"
            r"|factor|uniform|all.?reduce"
        )
    ],
    wrong=[
        r"not reduced|never reduced|missing all.?reduce",
        r"mean of (the )?means",
        r"rows? .{0,30}(lost|missing|dropped)",
    ],
)

WHY = (
    "Each rank divides by the count of all ranks and DDP's average divides by the three ranks "
    "once more."
)
