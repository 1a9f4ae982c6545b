"""Data parallel training with activation checkpointing; the divisor is counted while the micro-batches run forward, so all forwards run before the
one backward. After reports on checkpointed blocks that read a module attribute (mask, cache, position): the recomputation finds the mask of
the last micro-batch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
SPLIT, LENGTH, VOCAB, WIDTH, HEADS, MICRO = (6, 4, 4), 8, 21, 12, 3, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 23), nn.Linear(23, WIDTH)

    def forward(self, x, mask):
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """A masked language model."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.mask = None

    def run(self, block, x, mask):
        return checkpoint(block, x, mask, use_reentrant=False)

    def forward(self, ids, mask):
        self.mask = mask
        x = self.embed(ids) + self.place.weight
        for block in self.blocks:
            x = self.run(block, x, mask)
        return self.head(self.norm(x))


class Stateful(Encoder):
    def run(self, block, x, mask):
        return checkpoint(lambda x: block(x, self.mask), x, use_reentrant=False)


def token_loss(model, rows):
    logits = model(rows["ids"], rows["mask"]).flatten(0, 1)
    return F.cross_entropy(logits, rows["labels"].flatten(), ignore_index=-100, reduction="sum")


class Clean:
    model = Encoder

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return self.model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = sum(SPLIT)
        labels = torch.randint(1, VOCAB, (rows, LENGTH), generator=g)
        length = torch.randint(3, LENGTH + 1, (rows, 1), generator=g)
        mask = torch.arange(LENGTH) < length
        hidden = (torch.rand(rows, LENGTH, generator=g) < 0.4) & mask
        hidden[:, 0] = True
        return {
            "ids": labels.masked_fill(hidden, 0),
            "mask": mask,
            "labels": labels.masked_fill(~hidden, -100),
        }

    def loss_sum(self, model, rows):
        return token_loss(model, rows), (rows["labels"] >= 0).sum()

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        own = torch.arange(sum(SPLIT)).split(SPLIT)[ctx.coords["dp"]]
        losses, count = [], torch.zeros((), dtype=torch.long)
        for at in own.tensor_split(MICRO):
            rows = {k: v[at] for k, v in batch.items()}
            losses.append(token_loss(model, rows))
            count += (rows["labels"] >= 0).sum()
        dist.all_reduce(count, group=group)
        (torch.stack(losses).sum() / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    model = Stateful


EXPECT = dict(
    right=[
        r"blocks\.[01]",
        r"comput\w+ again|recomput|checkpoint|another state|second time|something else",
    ],
    place=[r"blocks\.[01]"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"first forward .{0,30}wrong|loss (itself )?is (wrong|another)",
        r"(own|local) (count|denominator|divisor)|mean of (the )?means",
        r"(head|(?<!\d\.)\bnorm)\.\w+ (is|are) .{0,15}wrong",
    ],
)
WHY = (
    "The checkpointed function reads the mask from the module when it is called. All forwards run before the backward, so the recomputation of micro-batch 0 "
    "in blocks.0 and blocks.1 uses micro-batch 1's mask (the first forwards and the losses are right). The backward of blocks.0 and blocks.1 in micro-batch 0 is wrong on all ranks, "
    "and with it the gradients of the blocks (but for blocks.1.down.bias), of embed and of place; the last norm and the head are right, as is the last micro-batch."
)
