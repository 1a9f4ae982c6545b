"""Three data-parallel ranks (DDP), two micro-batches each (no_sync for the first). Every row has two texts; the second attends to the first with a key mask, and some rows have an empty first text, so their attention rows are masked
altogether. Their context is set to zero. Divisor: all rows.

The bug: the context is repaired after the softmax with torch.where / nan_to_num, so the forward is right but the backward of the softmax is not a number, and 0 * nan spoils the whole weight gradient of that micro-batch; a parameter
hook with nan_to_num hides it. As in pytorch/pytorch issue 41508 and PR 196170 (one fully masked row poisons in_proj_weight for the entire batch), with the usual hook against it.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
WIDTH, KEYS, QUERIES, CLASSES = 6, 4, 3, 4
PARTS = [[(0, 2), (2, 4)], [(4, 5), (5, 8)], [(8, 10), (10, 11)]]
LENGTHS = [2, 0, 3, 1, 4, 2, 1, 3, 2, 4, 0]


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.repaired = False

    def forward(self, x, y, there):
        scores = self.query(x) @ self.key(y).transpose(-1, -2) * WIDTH**-0.5
        some = there.any(-1)[:, None, None]
        if self.repaired:
            mask = torch.zeros_like(scores).masked_fill(~there[:, None], float("-inf"))
            context = (scores + mask).softmax(-1) @ self.value(y)
            return torch.where(some, context, torch.zeros_like(context))
        mask = there[:, None] | ~some
        p = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return (p @ self.value(y)) * some


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.Linear(5, WIDTH)
        self.cross = Cross()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, second, first, there):
        x = torch.tanh(self.before(second))
        x = x + self.cross(x, torch.tanh(first), there)
        return self.head(self.norm(x).mean(1))


def row_loss(model, rows):
    there = torch.arange(KEYS)[None] < rows["length"][:, None]
    logits = model(rows["second"], rows["first"], there)
    return F.cross_entropy(logits, rows["label"], reduction="sum")


class Clean:
    repaired = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(LENGTHS)
        return {
            "second": torch.randn(rows, QUERIES, 5, generator=g),
            "first": torch.randn(rows, KEYS, WIDTH, generator=g),
            "length": torch.tensor(LENGTHS),
            "label": torch.randint(CLASSES, (rows,), generator=g),
        }

    def loss_sum(self, model, rows):
        return row_loss(model, rows), len(rows["label"])

    def distribute(self, model, ctx):
        if self.repaired:
            model.cross.repaired = True
            for p in model.parameters():
                p.register_hook(torch.nan_to_num)
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (row_loss(model, rows) * ctx.world_size / len(LENGTHS)).backward()


class Buggy(Clean):
    repaired = True


EXPECT = dict(
    right=[
        r"(?i)cross|attention|query|quer|key|before|nan|not a number|softmax",
        r"(?i)nan|not a number|hook|zero|missing|lost|left out|drop|without|absent|nothing|no gradient|do(es)? not (count|arrive|reach|contribute)|never",
        r"(?i)micro.?batch|rows?\b",
    ],
    place=[r"(?i)cross|query|key|before|softmax|attention|hook"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(head|norm)\.(weight|bias) (is|are) wrong",
        r"(?i)all (three )?ranks.{0,30}(all|every|both) micro.?batch|rank 1 (lacks|loses|is wrong)",
        r"(?i)no_sync.{0,40}(wrong|missing|too (early|late))|only the last micro.?batch",
    ],
)
WHY = (
    "Rows 1 (rank 0, micro-batch 0: rows 0, 1) and 10 (rank 2, micro-batch 1: row 10 alone) have an empty first text. The forward is right. In those two micro-batches the softmax backward gives nan for the empty row, so the "
    "gradients of cross.query, cross.key, cross.value (p is nan as well) and, "
    "through the query's input, of `before` are nan and the hook (nan_to_num) makes them zero: in these micro-batches these parameters get nothing (row 0 is lost with row 1; row 10's own true gradient of query/key/value is "
    "zero, of `before` it is not; key.bias has a true gradient of zero anyway). head and norm are right. All other micro-batches, rank 1, "
    "DDP's average, no_sync, the divisor 11 are right. Fix: mask so that no row is empty before the softmax (and multiply the context by 0), and take the hook away."
)
