"""A decoder with activation checkpointing whose attention keeps a position counter for its
cache. After FAULTS class C15 (transformers: use_cache with gradient checkpointing).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}

ROWS, LENGTH, VOCABULARY, WIDTH, HEADS = 6, 5, 13, 8, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.use_cache, self.seen = False, 0

    def forward(self, x):
        length = x.shape[1]
        x = x + self.positions(length, x.dtype)
        if self.use_cache:
            self.seen += length
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))

    def positions(self, length, dtype):
        at = (self.seen + torch.arange(length)).to(dtype)[:, None]
        rate = 10.0 ** (-torch.arange(WIDTH // 2).to(dtype) / WIDTH)
        return torch.cat([(at * rate).sin(), (at * rate).cos()], dim=-1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + torch.tanh(self.mlp(self.norm2(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.gradient_checkpointing = False

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            block.attn.seen = 0  # a new sequence
            if self.gradient_checkpointing:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x))


class Clean:
    use_cache = False

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
        model.gradient_checkpointing = True
        for block in model.blocks:
            block.attn.use_cache = self.use_cache
        return model

    def mine(self, batch, ctx):
        return {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        mine = self.mine(batch, ctx)
        loss, count = self.loss_sum(model, mine)
        dist.all_reduce(count)
        (loss / count).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    use_cache = True


EXPECT = dict(
    right=[
        (
            r"backward|recomput|checkpoint|input gradient|forward (is |was )?right|(second"
            r"|again|twice).{0,40}(call|output)|output.{0,40}(second|again|differ)"
        ),
        r"blocks|attn",
    ],
    place=[r"blocks|attn"],
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
    "The recomputation in the backward reads the position counter that the forward has "
    "advanced, so blocks are differentiated at other positions."
)
