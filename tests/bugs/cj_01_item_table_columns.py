"""A click model over the last items that a user saw: an item table, the mean over the history, a
small MLP.

Parallelism: rows over dp (2), and the columns (features) of the item table over tp (2): each tp
rank looks up its own columns and the columns are gathered before the MLP, which is replicated.
Two micro-batches.

Bug: the sharded table calls `F.embedding` with its options by position. The engineer means to say
that the gradient is dense (what all_reduce needs), but the sixth position is
`scale_grad_by_freq`: the gradient of each item is divided by the number of times that the item
occurs in the micro-batch. After embedding shards of recommenders that port `nn.Embedding` options
by position (pytorch/pytorch issues on scale_grad_by_freq).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ITEMS, DIM, HIST = 11, 7, 6


class GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lo, width, group):
        ctx.lo, ctx.own = lo, x.shape[-1]
        full = x.new_zeros(*x.shape[:-1], width)
        full[..., lo : lo + x.shape[-1]] = x
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(ctx, g):
        return g[..., ctx.lo : ctx.lo + ctx.own].contiguous(), None, None, None


class ColumnTable(nn.Module):
    def __init__(self, table, lo, hi, group):
        super().__init__()
        self.weight = nn.Parameter(table.weight.detach()[:, lo:hi].clone())
        self.padding_idx, self.lo, self.width = table.padding_idx, lo, table.embedding_dim
        self.dense_grad = True
        self.group = group

    def look_up(self, ids):
        return F.embedding(ids, self.weight, self.padding_idx, sparse=not self.dense_grad)

    def forward(self, ids):
        return GatherColumns.apply(self.look_up(ids), self.lo, self.width, self.group)


class ColumnTableByPosition(ColumnTable):
    def look_up(self, ids):
        return F.embedding(ids, self.weight, self.padding_idx, None, 2.0, self.dense_grad)


class ClickModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.hidden = nn.Linear(DIM + 3, 9)
        self.click = nn.Linear(9, 1)

    def forward(self, history, dense):
        seen = (history != 0).unsqueeze(-1)
        e = self.items(history) * seen
        user = e.sum(1) / seen.sum(1).clamp(min=1)
        return self.click(torch.tanh(self.hidden(torch.cat([user, dense], -1)))).squeeze(-1)


class Clean:
    table_class = ColumnTable

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return ClickModel()

    def batch(self):
        g = torch.Generator().manual_seed(100 + self.seed)
        n = 13
        history = torch.randint(1, ITEMS, (n, HIST), generator=g)
        lengths = torch.randint(2, HIST + 1, (n, 1), generator=g)
        history = history * (torch.arange(HIST) < lengths)
        return {
            "history": history,
            "dense": torch.randn(n, 3, generator=g),
            "click": (torch.rand(n, generator=g) < 0.4).float(),
        }

    def loss_sum(self, model, rows):
        logit = model(rows["history"], rows["dense"])
        loss = F.binary_cross_entropy_with_logits(logit, rows["click"], reduction="sum")
        return loss, logit.shape[0]

    def distribute(self, model, ctx):
        tp = ctx.axes["tp"]
        cuts = [round(i * DIM / tp) for i in range(tp + 1)]
        r = ctx.coords["tp"]
        model.items = self.table_class(model.items, cuts[r], cuts[r + 1], ctx.group("tp"))
        return model

    def step(self, model, batch, ctx):
        n = batch["click"].shape[0]
        mine = torch.arange(n).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in mine.tensor_split(2):
            loss, _ = self.loss_sum(model, {k: v[part] for k, v in batch.items()})
            (loss / n).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    table_class = ColumnTableByPosition


EXPECT = dict(
    right=[
        r"scale_grad_by_freq|frequen|how often|number of (times|occurrences)|occur|repeated|"
        r"duplicate|positional|by position",
        r"embedding|table|look.?up|item",
    ],
    place=[r"look_up", r"ColumnTable", r"F\.embedding", r"items\.weight", r"dense_grad"],
    wrong=[
        r"not (all.?)?reduced over (dp|tp)",
        r"padding_idx.*(wrong|missing)",
        r"averag\w+ (instead of|rather than) sum",
        r"micro-?batch\w* .*(divided|scaled) twice",
    ],
)
WHY = """ColumnTableByPosition passes dense_grad=True as the sixth argument of F.embedding, which
is scale_grad_by_freq, not sparse. The forward is unchanged, but the backward divides the gradient
of each row of items.weight by the number of times that its id occurs in the ids of that
micro-batch. Only the gradient of items.weight is wrong, and there only rows of items that occur
more than once in a micro-batch; the MLP is right. A right cause says that the table's gradient is
scaled by the frequency of the items (scale_grad_by_freq set by a positional argument). The fix is
F.embedding(..., sparse=not self.dense_grad) by keyword."""
