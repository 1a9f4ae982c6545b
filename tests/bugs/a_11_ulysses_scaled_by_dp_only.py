"""Ulysses sequence parallelism beside data parallelism, DDP over all ranks. After FAULTS
C04-03 (VeOmni PR 338).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3, "sp": 2}}}}

ROWS, LENGTH, VOCABULARY, WIDTH, HEADS = 6, 6, 13, 8, 2


def exchange(x, group, cut, joined):
    """All-to-all: from a part of dimension `joined` to a part of dimension `cut`."""
    parts = torch.stack(x.chunk(dist.get_world_size(group), dim=cut))
    got = all_to_all_single(torch.empty_like(parts), parts, group=group)
    return torch.cat(got.unbind(), dim=joined)


class UlyssesAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.group = None

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in self.qkv(x).chunk(3, dim=-1))
        if self.group is not None:
            q, k, v = (exchange(t, self.group, cut=2, joined=1) for t in (q, k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.group is not None:
            y = exchange(y, self.group, cut=1, joined=2)
        return self.proj(y.flatten(-2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) / 5)
        self.norm, self.attn = nn.LayerNorm(WIDTH), UlyssesAttention()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, start=0):
        x = self.embed(ids) + self.position[start : start + ids.shape[1]]
        return self.head(x + self.attn(self.norm(x)))


class Clean:
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
        model.attn.group = ctx.group("sp")
        return DistributedDataParallel(model)

    def mine(self, batch, ctx):
        return {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        sp, size = ctx.coords["sp"], ctx.axes["sp"]
        mine = {k: v.chunk(size, dim=1)[sp] for k, v in self.mine(batch, ctx).items()}
        logits = model(mine["ids"], sp * (LENGTH // size))
        loss = F.cross_entropy(logits.flatten(0, 1), mine["labels"].flatten(), reduction="sum")
        num_tokens = (mine["labels"] != -100).sum()
        dist.all_reduce(num_tokens)
        (loss / num_tokens * self.loss_scale(ctx)).backward()

    def loss_scale(self, ctx):
        return ctx.world_size


class Buggy(Clean):
    def loss_scale(self, ctx):
        return ctx.axes["dp"]  # undo the average over data parallel ranks


EXPECT = dict(
    right=[r"0\.500?\b|1/2|half|size of sp|1 / ?sp"],
    place=[
        (
            r"every (rank|parameter|gradient)|all (ranks|parameters|gradients)|\bsp\b|scale"
            r"|factor|uniform|all.?reduce"
        )
    ],
    wrong=[
        r"not reduced|never reduced|missing all.?reduce",
        r"mean of (the )?means",
        r"rows? .{0,30}(lost|missing|dropped)",
        r"0\.333|1/3",
    ],
)

WHY = (
    "The loss is multiplied by the dp size 3 while DDP divides by all 6 ranks: every gradient "
    "is half, one over the sp size."
)
