"""Cell types from single-cell counts: a table with a vector for each gene is cut by rows over three ranks (five, four and six genes), cells are dealt out to the same ranks, two micro-batches each of uneven size. For a lookup every rank asks
the owner of each gene with an all-to-all, and the vectors come back with another one (and their gradients the other way). Dense parameters are summed over ranks; the divisor is the number of cells.

The bug: the owner is searched in the first genes of ranks 1 and 2 from the left, so that a gene that is itself the first of a shard is asked of the rank before, which gives its last row. Bucketizing ids by uneven row-wise shards is in
meta-pytorch/torchrec PR 4262 (Enable uneven buckets per rank); the side of torch.bucketize is the subject of pytorch/pytorch PR 38119 (add document for bucktization).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
SHARDS = [5, 4, 6]
STARTS = [0, 5, 9]
GENES, SEEN, WIDTH, TYPES, ROWS = 15, 5, 6, 4, 14
PARTS = [[(0, 3), (3, 5)], [(5, 6), (6, 10)], [(10, 12), (12, 14)]]


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.splits = send, receive, group
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        send, receive, group = ctx.splits
        out = grad.new_empty(sum(send), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), send, receive, group=group)
        return out, None, None, None


class GeneTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(GENES, WIDTH))
        self.group, self.side = None, "right"

    def ask(self, genes):
        firsts = torch.tensor(STARTS[1:])
        owner = torch.searchsorted(firsts, genes, side=self.side)
        order = owner.argsort(stable=True)
        local = (genes - torch.tensor(STARTS)[owner])[order]
        send = owner.bincount(minlength=len(STARTS))
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send, group=self.group)
        send, receive = send.tolist(), receive.tolist()
        asked = Exchange.apply(local, send, receive, self.group)
        found = F.embedding(asked.clamp(max=len(self.weight) - 1), self.weight)
        return Exchange.apply(found, receive, send, self.group)[order.argsort()]

    def forward(self, genes):
        if self.group is None:
            return F.embedding(genes, self.weight)
        return self.ask(genes.flatten()).view(*genes.shape, WIDTH)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.genes = GeneTable()
        self.count = nn.Linear(1, WIDTH)
        self.wide, self.norm = nn.Linear(WIDTH, 11), nn.LayerNorm(11)
        self.kind = nn.Linear(11, TYPES)

    def forward(self, genes, counts):
        x = self.genes(genes) * torch.sigmoid(self.count(torch.log1p(counts)[:, :, None]))
        return self.kind(F.silu(self.norm(self.wide(x))).mean(1))


class Clean:
    side = "right"

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "genes": torch.rand(ROWS, GENES, generator=g).argsort(1)[:, :SEEN],
            "counts": torch.randint(1, 30, (ROWS, SEEN), generator=g).float(),
            "kind": torch.randint(TYPES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        scores = model(rows["genes"], rows["counts"])
        return F.cross_entropy(scores, rows["kind"], reduction="sum"), len(scores)

    def shard_of(self, name, ctx):
        if name != "genes.weight":
            return None
        return (slice(STARTS[ctx.rank], STARTS[ctx.rank] + SHARDS[ctx.rank]), slice(None))

    def distribute(self, model, ctx):
        table, low = model.genes, STARTS[ctx.rank]
        own = table.weight.detach()[low : low + SHARDS[ctx.rank]].clone()
        table.weight = nn.Parameter(own)
        table.group, table.side = ctx.group("dp"), self.side
        return model

    def step(self, model, batch, ctx):
        model.zero_grad()
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            loss, _ = self.loss_sum(model, rows)
            (loss / ROWS).backward()
        for name, p in model.named_parameters():
            if name != "genes.weight":
                dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    side = "left"


EXPECT = dict(
    right=[
        r"(?i)genes|GeneTable|table|searchsorted|ask|owner|lookup",
        r"(?i)row|gene|index|place|owner|searchsorted|side|clamp|shard|other (vectors|numbers|rows|values)|border|embedding",
    ],
    place=[r"(?i)genes|GeneTable|searchsorted|\bask\b|owner|clamp|embedding|side"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|all.?to.?all.{0,40}(missing|backward (is )?wrong)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)(count|wide|norm|kind)(\.weight)? goes wrong in (its|the) forward|all genes .{0,20}wrong",
        r"(?i)recomput|labels? .{0,20}(is|are) wrong|vectors come back in (the )?(wrong|another) order|not sorted back",
    ],
)
WHY = (
    "In GeneTable.ask the owner is found with searchsorted in [5, 9]; with side='left' gene 5 (first of rank 1) is given to rank 0 and gene 9 (first of rank 2) to rank 1. There the local number is 5 or 4, one beyond the shard, "
    "and the clamp makes it the last row: gene 5 gets the vector of gene 4 (rank 0), gene 9 that of gene 8 (rank 1). All other genes are right. So the output of `genes` is wrong where a cell has gene 5 or 9, on whatever rank the cell is; the "
    "gradient of the rows 5 and 9 of the table is zero (row 0 on ranks 1 and 2), and rows 4 and 8 get it on top (last rows on ranks 0, 1). The dense parameters get wrong gradients from these cells, too. Exchange, its backward, order, the "
    "reduction, divisor 14 are right. Fix: side='right'."
)
