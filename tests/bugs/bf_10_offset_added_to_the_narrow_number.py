"""A click model with one fused embedding table of 310 rows (four fields of 120, 90, 60 and 40 values, each at its offset) on two data ranks times two ranks that divide the table by rows. The first of the two sends the values to the other
as uint8, for no field has more than 120 values. Each rank looks up what it holds, the vectors are summed over the two; the dense layers are replicated. Two micro-batches of odd size; gradients are summed over the data ranks; divisor:
rows.

The bug: the field's offset is added to the uint8 values and the sum is widened afterwards. A python number does not widen a tensor of the same kind, so sums beyond 255 wrap around and read rows of the first field. After
pytorch/pytorch issues 58489 (Type promotion is broken for binary ops with uint8) and 101653.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
VALUES, WIDTH, ROWS = [120, 90, 60, 40], 3, 13
OFFSETS = [sum(VALUES[:n]) for n in range(len(VALUES))]
PARTS = [[(0, 4), (4, 7)], [(7, 8), (8, 13)]]


class Total(torch.autograd.Function):
    """Sum over the ranks; every rank has the whole gradient of the result."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(sum(VALUES), WIDTH))
        self.dense = nn.Sequential(nn.Linear(len(VALUES) * WIDTH, 8), nn.SiLU(), nn.Linear(8, 1))
        self.group, self.low = None, 0

    def forward(self, rows):
        """Scores for the given rows of the fused table, one per field."""
        if self.group is None:
            vectors = self.table[rows]
        else:
            here = (rows >= self.low) & (rows < self.low + len(self.table))
            own = (rows - self.low).clamp(0, len(self.table) - 1)
            vectors = Total.apply(self.table[own] * here[..., None], self.group)
        return self.dense(vectors.flatten(1)).squeeze(1)


def click_loss(scores, click):
    return F.binary_cross_entropy_with_logits(scores, click.to(scores.dtype), reduction="sum")


class Clean:
    wide_first = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        fields = [torch.randint(n, (ROWS,), generator=g) for n in VALUES]
        return {"fields": torch.stack(fields, 1), "click": torch.randint(2, (ROWS,), generator=g)}

    def loss_sum(self, model, rows):
        scores = model(rows["fields"] + torch.tensor(OFFSETS))
        return click_loss(scores, rows["click"]), len(rows["click"])

    def distribute(self, model, ctx):
        share = sum(VALUES) // 2
        model.group, model.low = ctx.group("tp"), ctx.coords["tp"] * share
        model.table = nn.Parameter(model.table.detach()[model.low : model.low + share].clone())
        return model

    def fused_rows(self, packed):
        columns = []
        for field, offset in zip(packed.unbind(1), OFFSETS):
            if self.wide_first:
                field = field.long()
            columns.append((field + offset).long())
        return torch.stack(columns, 1)

    def step(self, model, batch, ctx):
        model.zero_grad(set_to_none=True)
        group = ctx.group("tp")
        for low, high in PARTS[ctx.coords["dp"]]:
            packed = torch.zeros(high - low, len(VALUES), dtype=torch.uint8)
            if ctx.coords["tp"] == 0:
                packed.copy_(batch["fields"][low:high])
            dist.broadcast(packed, dist.get_global_rank(group, 0), group=group)
            loss = click_loss(model(self.fused_rows(packed)), batch["click"][low:high])
            (loss / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    wide_first = False


EXPECT = dict(
    right=[
        r"(?i)table|field|input|index|indices|rows? of the (model|table)|values|dense",
        r"(?i)input|index|indices|other rows|wrong rows|lookup|looks up|reads|forward|uint8|overflow|wrap|offset|table",
        r"(?i)forward|input|index|indices|other rows|wrong rows|different rows|looks up|wrap|overflow|uint8",
    ],
    place=[r"(?i)table|fused_rows|input|dense|offset|\bmodel\b"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|wrong group",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[24]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the (last|first) micro.?batch",
        r"(?i)only (on )?rank [0-3]\b|rank [0-3] alone|ranks? (1|3)( and 3)? (alone|only)",
        r"(?i)labels? .{0,20}(is|are) wrong|detach|recomput|dropout",
        r"(?i)forward is right|goes wrong (first |only )?in the backward",
    ],
)
WHY = (
    "fused_rows adds the offset to uint8 values: sums beyond 255 wrap. Field 0 (offset 0) and field 1 (offset 120, at most 209) are right; field 2 (offset 210) is wrong where its value is 46 or more (row index 256 to 269 becomes 0 to "
    "13); field 3 (offset 270) is always wrong (14 + value instead of 270 + value, rows of field 0). So the forward of the model gets wrong table rows as input on all four ranks, in all micro-batches and all batch rows. Rows 270 to 309 "
    "of the table (on ranks with tp 1) get no gradient, rows 14 to 53 (tp 0) get theirs; dense.0 reads wrong vectors, so all gradients are wrong. Broadcast, sum over tp, reduction over dp, divisor 13 right. Fix: widen to int64 before "
    "the offset is added."
)
