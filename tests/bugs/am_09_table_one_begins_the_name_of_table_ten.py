"""Click prediction (DLRM) with thirteen embedding tables on three data-parallel ranks, two micro-batches each. One table is large and only few of its rows are used, so its gradient is summed over dp by its own routine (the rows that any
rank used); everything else goes through one flat buffer. The divisor is the number of clicks and non-clicks (rows) of the whole batch.

The bug: the large table is table 1 and is kept out of the flat buffer by name, with startswith("tables.1"). That begins the names of tables 10, 11 and 12 too, which are summed by nobody. As with lists of names taken as prefixes or
regular expressions for frozen or excluded layers in public code ("layers.1" and "layers.10"), and DDP's _set_params_and_buffers_to_ignore_for_model by name.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
FIELDS, DENSE, WIDTH, LARGE = 13, 3, 4, 1
PARTS = [[(0, 3), (3, 5)], [(5, 6), (6, 10)], [(10, 12), (12, 13)]]
ROWS = 13
SIZES = [5, 40, 4, 6, 3, 5, 7, 4, 5, 6, 5, 4, 6]


class ClickNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, WIDTH) for size in SIZES)
        self.bottom = nn.Linear(DENSE, WIDTH)
        self.top = nn.Sequential(
            nn.Linear(WIDTH + (FIELDS + 1) * FIELDS // 2, 8), nn.SiLU(), nn.Linear(8, 1)
        )

    def forward(self, dense, ids):
        first = F.silu(self.bottom(dense))
        fields = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        x = torch.stack([first, *fields], 1)
        pairs = torch.triu_indices(FIELDS + 1, FIELDS + 1, 1)
        crossed = (x @ x.transpose(1, 2))[:, pairs[0], pairs[1]]
        return self.top(torch.cat([first, crossed], 1))[:, 0]


def click_loss(model, rows):
    scores = model(rows["dense"], rows["ids"])
    return F.binary_cross_entropy_with_logits(
        scores, rows["click"].to(scores.dtype), reduction="sum"
    )


class Clean:
    large = f"tables.{LARGE}."

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return ClickNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = [torch.randint(size, (ROWS,), generator=g) for size in SIZES]
        return {
            "dense": torch.randn(ROWS, DENSE, generator=g),
            "ids": torch.stack(ids, 1),
            "click": torch.randint(2, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return click_loss(model, rows), len(rows["click"])

    def distribute(self, model, ctx):
        return model

    def reduce_used_rows(self, grad, ids, group):
        used = torch.zeros(len(grad), dtype=torch.int32)
        used[ids] = 1
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
        rows = grad[used.bool()]
        dist.all_reduce(rows, group=group)
        grad[used.bool()] = rows

    def step(self, model, batch, ctx):
        group, parts = ctx.group("dp"), PARTS[ctx.rank]
        for low, high in parts:
            rows = {k: v[low:high] for k, v in batch.items()}
            (click_loss(model, rows) / ROWS).backward()
        rest = [p.grad for n, p in model.named_parameters() if not n.startswith(self.large)]
        flat = torch.cat([grad.flatten() for grad in rest])
        dist.all_reduce(flat, group=group)
        for grad, piece in zip(rest, flat.split([grad.numel() for grad in rest])):
            grad.copy_(piece.view_as(grad))
        ids = batch["ids"][parts[0][0] : parts[-1][1], LARGE]
        self.reduce_used_rows(model.tables[LARGE].weight.grad, ids, group)


class Buggy(Clean):
    large = f"tables.{LARGE}"


EXPECT = dict(
    right=[
        r"(?i)(never|not|un|no|without|missing|lack|left out|skip|omit|only (its|their|the) own|own (rows|part|share)|local|partial)",
        r"(?i)reduc|summed|sum over|all.?reduce|synchroni|other ranks|own (rows|part|share)",
        r"(?i)tables?[\.\[ ]?\s?(10|11|12)",
    ],
    place=[r"(?i)tables?[\.\[ ]?\s?(10|11|12)"],
    wrong=[
        r"(?i)tables\.(0|1|2|3|4|5|6|7|8|9)(\.weight)? (is|are|was) (wrong|not)",
        r"(?i)(reduced|summed|counted) (twice|again)|wrong divisor|mean of means",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward|wrong labels?|labels? .{0,15}wrong",
        r"(?i)only (on )?rank [012] (is|are|has)? ?wrong|(top|bottom)\S* .{0,20}wrong",
        r"(?i)backward of .{0,20}wrong|adjoint",
    ],
)
WHY = (
    "tables.10, tables.11 and tables.12 are left out of the flat buffer by the prefix 'tables.1' and not summed by the routine for the large table (table 1 alone), so every rank keeps its own rows' gradient for these three: rank 0 rows "
    "0-4, rank 1 rows 5-9, rank 2 rows 10-12, each over the full divisor 13; the ranks disagree, and the three gradients add up to the right one. All other tables (also 1 itself), bottom and top are right; forward, loss, divisor and "
    "accumulation are right. Fix: compare with 'tables.1.' (or the whole name)."
)
