"""A click model whose four embedding tables are dealt out to three ranks (table-wise sharding; rank 0 has tables 0 and 3). Bags are of uneven length and every id has a weight. Each rank sends the lengths, ids and weights of its rows to the
owners, which pool, and gets its rows' vectors back; two micro-batches of uneven size on each rank. The dense part is on all ranks and its gradients are summed; the divisor is the number of rows of all ranks.

The bug: what an owner receives lies rank after rank, and is put in the order table after table. This is done with the lengths and ids, not with the weights. After the permutation of KeyedJaggedTensor after its all-to-all in
meta-pytorch/torchrec, which takes lengths, values and weights (PR 4761, Fix absent weights in scripted KJT permutations).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"mp": 3}}}}
TABLES, LONGEST, WIDTH, DENSE = [8, 6, 7, 9], 4, 5, 3
PARTS = [[(0, 3), (3, 4)], [(4, 6), (6, 9)], [(9, 11), (11, 13)]]
ROWS = 13


class Exchange(torch.autograd.Function):
    """All-to-all of rows; the way back of the gradient is the other way round."""

    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return exchange(x, send, receive, group)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def exchange(x, send, receive, group):
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


def pool(table, ids, weights, lengths):
    bag = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    out = table.weight.new_zeros(len(lengths), table.embedding_dim)
    return out.index_add(0, bag, table(ids) * weights[:, None])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleDict({str(n): nn.Embedding(k, WIDTH) for n, k in enumerate(TABLES)})
        self.bottom = nn.Linear(DENSE, WIDTH)
        self.top = nn.Sequential(
            nn.Linear(WIDTH * (len(TABLES) + 1), 9), nn.SiLU(), nn.Linear(9, 1)
        )

    def score(self, dense, bags):
        return self.top(torch.cat([F.silu(self.bottom(dense)), *bags], 1)).squeeze(1)


class Clean:
    with_weights = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = [torch.randint(k, (ROWS, LONGEST), generator=g) for k in TABLES]
        return {
            "dense": torch.randn(ROWS, DENSE, generator=g),
            "ids": torch.stack(ids, 1),
            "weights": torch.rand(ROWS, len(TABLES), LONGEST, generator=g) * 2,
            "lengths": torch.randint(1, LONGEST + 1, (ROWS, len(TABLES)), generator=g),
            "click": torch.randint(2, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        inside = torch.arange(LONGEST) < rows["lengths"][:, :, None]
        weights = rows["weights"] * inside
        bags = [
            (model.tables[str(n)](rows["ids"][:, n]) * weights[:, n, :, None]).sum(1)
            for n in range(len(TABLES))
        ]
        scores = model.score(rows["dense"], bags)
        click = rows["click"].to(scores.dtype)
        return F.binary_cross_entropy_with_logits(scores, click, reduction="sum"), len(click)

    def distribute(self, model, ctx):
        mine = range(ctx.rank, len(TABLES), ctx.world_size)
        model.tables = nn.ModuleDict({str(n): model.tables[str(n)] for n in mine})
        return model

    def by_table(self, lengths, per_rank, tables):
        """Order of the received elements: table after table, in each rank after rank."""
        start = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).tolist()
        first, bags = 0, [[] for _ in range(tables)]
        for rows in per_rank:
            for n in range(tables):
                bags[n] += range(first, first + rows)
                first += rows
        order = [bag for table in bags for bag in table]
        inside = [e for bag in order for e in range(start[bag], start[bag + 1])]
        return torch.tensor(order, dtype=torch.long), torch.tensor(inside, dtype=torch.long)

    def lookup(self, model, rows, ctx):
        group, world = ctx.group("mp"), ctx.world_size
        owned = [list(range(r, len(TABLES), world)) for r in range(world)]
        count, tables = len(rows["click"]), len(owned[ctx.rank])
        inside = torch.arange(LONGEST) < rows["lengths"][:, :, None]
        parts = [(n, inside[:, n]) for mine in owned for n in mine]
        lengths = torch.cat([rows["lengths"][:, n] for n, _ in parts])
        ids = torch.cat([rows["ids"][:, n][at] for n, at in parts])
        weights = torch.cat([rows["weights"][:, n][at] for n, at in parts])

        per_rank = exchange(torch.full((world,), count), [1] * world, [1] * world, group).tolist()
        send = [count * len(mine) for mine in owned]
        receive = [n * tables for n in per_rank]
        there = exchange(lengths, send, receive, group)
        send_ids = [int(part.sum()) for part in lengths.split(send)]
        receive_ids = [int(part.sum()) for part in there.split(receive)]
        ids = exchange(ids, send_ids, receive_ids, group)
        weights = exchange(weights, send_ids, receive_ids, group)

        order, elements = self.by_table(there, per_rank, tables)
        there, ids = there[order], ids[elements]
        if self.with_weights:
            weights = weights[elements]

        pooled, low = [], 0
        for n, lengths in zip(owned[ctx.rank], there.split(sum(per_rank))):
            high = low + int(lengths.sum())
            pooled.append(pool(model.tables[str(n)], ids[low:high], weights[low:high], lengths))
            low = high
        back = torch.cat([p for r in zip(*(t.split(per_rank) for t in pooled)) for p in r])
        vectors = Exchange.apply(back, receive, send, group).split(count)
        names = [n for mine in owned for n in mine]
        return [vectors[names.index(n)] for n in range(len(TABLES))]

    def step(self, model, batch, ctx):
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            scores = model.score(rows["dense"], self.lookup(model, rows, ctx))
            click = rows["click"].to(scores.dtype)
            loss = F.binary_cross_entropy_with_logits(scores, click, reduction="sum")
            (loss / ROWS).backward()
        for part in (model.bottom, model.top):
            for p in part.parameters():
                dist.all_reduce(p.grad, group=ctx.group("mp"))


class Buggy(Clean):
    with_weights = False


EXPECT = dict(
    right=[
        r"(?i)weights?\b|pool|tables?|index_add|lookup|bb_06\w*\.py:\d+",
        r"(?i)order|permut|other places|belong|beside|other rows|another|stand|rank 0|forward|nowhere|argument|"
        r"wrong (place|row)|of others",
    ],
    place=[r"(?i)weights?\b|pool|tables?(\.|\[)?['\"]?[03]|lookup|bb_06\w*\.py:\d+"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|sum over mp .{0,20}missing",
        r"(?i)mean of means|divi(ded|des) by (its|their) own (count|rows)|wrong (loss )?divisor",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)tables\.[12].{0,30}(forward|pool|output).{0,20}wrong|backward of Exchange is wrong",
        r"(?i)\bids\b .{0,20}(is|are) (wrong|in another order|permuted)|lengths .{0,20}(is|are) wrong",
        r"(?i)labels? .{0,20}(is|are) wrong|gradient_sent_back .{0,20}wrong",
    ],
)
WHY = (
    "On rank 0, the only rank with two tables (0 and 3), the received elements lie rank after rank, in each table 0, then table 3. Lengths and ids are put into the order table after table (by_table), the weights of the ids are not (lookup, "
    "`weights = weights[elements]` is left out), so in `pool` ids of tables 0 and 3 are multiplied with weights of other ids (of other tables, rows and ranks; the first ones, of rank 0's rows in table 0, stand right, and the last ones). "
    "Ranks 1 and 2 own one table each, there the order is the same and all is right. The pooled vectors of tables 0 and 3 are wrong for rows of all ranks, in both micro-batches; so all gradients are wrong (tables 1 and 2 through the top). The "
    "exchange, its backward, the sums of the dense part and the divisor are right. Fix: permute the weights with the ids."
)
