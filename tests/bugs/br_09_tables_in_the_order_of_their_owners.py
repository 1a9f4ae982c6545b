"""A recommender with table parallelism (DLRM): five embedding tables are dealt out over three ranks (0 and 3, 1 and 4, 2); a rank looks up its tables for the rows of all ranks, and an all-to-all brings every rank the
vectors of all tables for its own rows (3, 3 and 2 of eight). These are laid side by side with the dense features for the top network. Two micro-batches, gradients summed over the ranks.

The bug: what comes back from the all-to-all is laid side by side as it arrives, by owner (0, 3, 1, 4, 2), without going back to the order of the tables. After table-wise sharding in DLRM and TorchRec, where the
features have to be permuted after the output dist.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, DENSE, DIM = 11, 4, 3
SIZES = (7, 5, 9, 6, 8)
TABLES = len(SIZES)


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, DIM) for n in SIZES)
        self.bottom = nn.Linear(DENSE, DIM)
        self.top = nn.Sequential(nn.Linear((TABLES + 1) * DIM, 7), nn.ReLU(), nn.Linear(7, 1))

    def predict(self, dense, vectors):
        x = torch.cat((torch.tanh(self.bottom(dense))[:, None], vectors), 1)
        return self.top(x.flatten(1))[:, 0]

    def forward(self, dense, ids):
        return self.predict(
            dense, torch.stack([t(ids[:, i]) for i, t in enumerate(self.tables)], 1)
        )


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, sent, received, group):
        fctx.splits, fctx.group = (sent, received), group
        out = x.new_empty(sum(received))
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(fctx, grad):
        sent, received = fctx.splits
        out = grad.new_empty(sum(sent))
        dist.all_to_all_single(out, grad.contiguous(), sent, received, group=fctx.group)
        return out, None, None, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Recommender()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "dense": torch.randn(ROWS, DENSE, generator=g),
            "ids": torch.stack([torch.randint(n, (ROWS,), generator=g) for n in SIZES], 1),
            "click": torch.randint(2, (ROWS,), generator=g).float(),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["dense"], rows["ids"])
        loss = F.binary_cross_entropy_with_logits(
            logits, rows["click"].to(logits.dtype), reduction="sum"
        )
        return loss, len(logits)

    @staticmethod
    def owned(rank, world_size):
        return list(range(rank, TABLES, world_size))

    def merge(self, blocks, world_size):
        """From the owners' order to the order of the tables."""
        order = [t for r in range(world_size) for t in self.owned(r, world_size)]
        place = torch.tensor(order).argsort()
        return torch.cat(blocks)[place].transpose(0, 1)

    def look_up(self, model, ids_of, ctx):
        """ids_of: for each rank the ids of its rows in this micro-batch."""
        n, me = ctx.world_size, ctx.rank
        own = self.owned(me, n)
        flat = [torch.stack([model.tables[t](ids[:, t]) for t in own]).flatten() for ids in ids_of]
        mine = len(ids_of[me])
        received = [len(self.owned(r, n)) * mine * DIM for r in range(n)]
        out = AllToAll.apply(torch.cat(flat), [len(f) for f in flat], received, ctx.group("dp"))
        return self.merge([b.view(-1, mine, DIM) for b in out.split(received)], n)

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        ids = batch["ids"].tensor_split(ctx.world_size)
        dense, click = (batch[k].tensor_split(ctx.world_size)[ctx.rank] for k in ("dense", "click"))
        for m in range(2):
            vectors = self.look_up(model, [i.tensor_split(2)[m] for i in ids], ctx)
            logits = model.predict(dense.tensor_split(2)[m], vectors)
            loss = F.binary_cross_entropy_with_logits(
                logits, click.tensor_split(2)[m].to(logits.dtype), reduction="sum"
            )
            (loss / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def merge(self, blocks, world_size):
        return torch.cat(blocks).transpose(0, 1)


EXPECT = dict(
    right=[
        r"order|permut|arrang|layout|swap|mix(ed)? up|side by side|owner|reorder|shuffl",
        r"table|all.?to.?all|merge|embedding|vectors|feature|block|column|AllToAll",
    ],
    place=[r"\bmerge\b", r"look_up", r"AllToAll|all_to_all|all.?to.?all", r"top|predict"],
    wrong=[
        r"gradients?.{0,40}(not|never) reduced|reduced twice|counted twice|mean of means|divisor",
        r"(rows?|ids) .{0,20}(of another rank|wrong rank|other rank)|split sizes|adjoint|backward of AllToAll",
        r"micro.?batch.{0,20}(lost|dropped)|detached",
    ],
)
WHY = (
    "The all-to-all delivers blocks by owner: tables 0 and 3 of rank 0, 1 and 4 of rank 1, 2 of rank 2. The top network's columns are in the order 0, 1, 2, 3, 4, so merge() has to permute; the buggy one only "
    "concatenates, and the columns of the tables 1, 2, 3 and 4 get the vectors of 3, 1, 4 and 2. Predictions and all gradients (top, bottom, tables) are wrong on all ranks and in both micro-batches, though each value is one "
    "of the right ones; exchange, adjoint, rows and divisor are right. A right cause says that tables' vectors are in another order after the all-to-all (owner's order). Fix: index with argsort of the owners' order."
)
