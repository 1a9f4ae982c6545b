"""A click model of the DLRM kind in hybrid parallel on three ranks: five embedding tables of unequal height lie whole on their owners (two, two and one), each owner sums the bags of the rows of all
ranks, an all-to-all brings every rank the sums of its own rows, and the dense networks are data parallel (3, 3 and 2 of eight rows; two micro-batches). The products of all pairs of fields go into
the upper network. The dense gradients are summed over the ranks; a table's gradient is complete on its owner.

The bug: the model itself reads the pairs of fields below the diagonal, row by row; the step's fused interaction takes them above the diagonal, row by row, so that most products meet weights of the
upper network that belong to another pair. After reports about fused dot-interaction kernels and exported models of DLRM whose pairs come in another order than tril_indices.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
HEIGHTS = [7, 5, 9, 4, 6]
OWNER = [0, 1, 2, 0, 1]
FIELDS = len(HEIGHTS) + 1
WIDTH, DENSE, BAG, ROWS = 4, 3, 2, 8


class ClickModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleDict(
            {
                f"t{n}": nn.EmbeddingBag(height, WIDTH, mode="sum")
                for n, height in enumerate(HEIGHTS)
            }
        )
        self.bottom = nn.Sequential(nn.Linear(DENSE, 6), nn.Tanh(), nn.Linear(6, WIDTH), nn.Tanh())
        self.top = nn.Sequential(
            nn.Linear(WIDTH + FIELDS * (FIELDS - 1) // 2, 7), nn.Tanh(), nn.Linear(7, 1)
        )

    def forward(self, dense, ids):
        x = self.bottom(dense)
        fields = torch.stack(
            [x] + [self.tables[f"t{n}"](ids[:, n]) for n in range(len(HEIGHTS))], 1
        )
        products = fields @ fields.transpose(1, 2)
        i, j = torch.tril_indices(FIELDS, FIELDS, -1)
        return self.top(torch.cat([x, products[:, i, j]], 1))[:, 0]


class Exchange(torch.autograd.Function):
    """all-to-all of flat pieces; the gradients take the same way back."""

    @staticmethod
    def forward(ctx, flat, sends, receives, group):
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        out = flat.new_empty(sum(receives))
        dist.all_to_all_single(out, flat.contiguous(), receives, sends, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        back = grad.new_empty(sum(ctx.sends))
        dist.all_to_all_single(back, grad.contiguous(), ctx.sends, ctx.receives, group=ctx.group)
        return back, None, None, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return ClickModel()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "dense": torch.randn(ROWS, DENSE, generator=g),
            "ids": torch.stack(
                [torch.randint(height, (ROWS, BAG), generator=g) for height in HEIGHTS], 1
            ),
            "click": torch.randint(2, (ROWS,), generator=g).to(torch.get_default_dtype()),
        }

    def loss_sum(self, model, rows):
        return F.binary_cross_entropy_with_logits(
            model(rows["dense"], rows["ids"]),
            rows["click"].to(rows["dense"].dtype),
            reduction="sum",
        ), len(rows["click"])

    def distribute(self, model, ctx):
        for n, owner in enumerate(OWNER):
            if owner != ctx.rank:
                del model.tables[f"t{n}"]
        return model

    def pooled(self, model, ids_of, ctx):
        """[own rows, tables, width]: the sums of the own rows from the owners of all tables."""
        owned = [
            [n for n, owner in enumerate(OWNER) if owner == rank] for rank in range(ctx.world_size)
        ]
        here = owned[ctx.rank]
        flat = torch.cat(
            [
                torch.stack([model.tables[f"t{n}"](ids[:, n]) for n in here], 1).reshape(-1)
                for ids in ids_of
            ]
        )
        sends = [len(ids) * len(here) * WIDTH for ids in ids_of]
        rows = len(ids_of[ctx.rank])
        receives = [rows * len(tables) * WIDTH for tables in owned]
        parts = Exchange.apply(flat, sends, receives, ctx.group("dp")).split(receives)
        arrived = torch.cat(
            [part.view(rows, len(tables), WIDTH) for part, tables in zip(parts, owned)], 1
        )
        order = [n for tables in owned for n in tables]
        return arrived[:, torch.tensor([order.index(n) for n in range(len(HEIGHTS))])]

    def interaction(self, fields):
        """The products of the pairs, without making the square of all fields."""
        return torch.cat(
            [(fields[:, i : i + 1] * fields[:, :i]).sum(-1) for i in range(1, FIELDS)], 1
        )

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        shares = [
            {k: v.tensor_split(ctx.world_size)[rank] for k, v in batch.items()}
            for rank in range(ctx.world_size)
        ]
        for n in range(2):
            parts = [{k: v.tensor_split(2)[n] for k, v in share.items()} for share in shares]
            mine = parts[ctx.rank]
            x = model.bottom(mine["dense"])
            fields = torch.cat(
                [x[:, None], self.pooled(model, [part["ids"] for part in parts], ctx)], 1
            )
            logit = model.top(torch.cat([x, self.interaction(fields)], 1))[:, 0]
            loss = F.binary_cross_entropy_with_logits(
                logit, mine["click"].to(logit.dtype), reduction="sum"
            )
            (loss / ROWS).backward()
        for name, p in model.named_parameters():
            if not name.startswith("tables"):
                dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def interaction(self, fields):
        return torch.cat(
            [(fields[:, i : i + 1] * fields[:, i + 1 :]).sum(-1) for i in range(FIELDS - 1)], 1
        )


EXPECT = dict(
    right=[
        r"interaction|pair|product|triang|tril|triu|order|permut|column|input of (the )?(module )?top|top(\.0)?\b",
        r"forward|order|permut|swap|column|triang|differ|input|value",
    ],
    place=[r"interaction", r"top(\.0)?\b", r"\bpairs?\b", r"triang"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"all.?to.?all .{0,40}(wrong|unsorted|not undone|mixed)|tables? .{0,30}(wrong owner|wrong rows)",
    ],
)
WHY = (
    "ClickModel reads the fifteen products of pairs of fields from below the diagonal, (1,0), (2,0), (2,1), (3,0)...; Buggy.interaction makes the same fifteen numbers in the order (0,1), (0,2), (0,3)..., "
    "above the diagonal. All products are right as numbers, but beyond the first two they stand in other columns of the input of top.0. From there the logits, the losses and all gradients are wrong, on "
    "all three ranks and in both micro-batches: top.0's columns, and through it the bottom network and all tables. The sums of the bags, the all-to-all and its way back, the order of the tables after it, "
    "the sum of the dense gradients and the divisor 8 are right. Fix: take the pairs below the diagonal, row by row, as the model does."
)
