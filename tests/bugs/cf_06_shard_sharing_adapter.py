"""MiSS adapters (peft) on the row-parallel down projections of a small residual MLP, tp 2 x dp
2.

MiSS folds the input features into groups of r, sums over the groups and multiplies by one small
block; so the row of the block that a feature meets is its number modulo r. up is cut by outputs,
down by inputs (13 features: 7 + 6), the block is replicated and its partial gradients are summed
over tp; base weights are frozen, embedding and head are trained.

The bug: the row-parallel forward folds the rank's own features from zero, with the padding of
peft behind, although the second rank's first feature has number 7, which is 3 modulo 4. After
tensor parallel ports of peft layers that keep the layer's forward and cut its weight.
"""

import torch
import torch.distributed as dist
from peft import MissConfig, inject_adapter_in_model
from peft.tuners.miss.layer import MissLinear
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}

ROWS, LENGTH, VOCAB, WIDTH, INNER, R = 5, 6, 17, 10, 13, 4


class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.group = None

    def forward(self, x):
        h = self.norm(x)
        if self.group is not None:
            h = CopyIn.apply(h, self.group)
        return x + self.down(nn.functional.silu(self.up(h)))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class RowParallelMiss(MissLinear):
    """The layer after the cut: base weight and input are this rank's features."""

    def fold(self, x, r):
        lead = self.first_feature % r
        x = nn.functional.pad(x, (lead, -(lead + x.shape[-1]) % r))
        return x.unflatten(-1, (-1, r)).sum(-2)

    def forward(self, x):
        miss = self.miss_block["default"]
        part = nn.functional.linear(x, self.base_layer.weight) + self.fold(x, miss.shape[0]) @ miss
        return SumOut.apply(part, self.group) + self.base_layer.bias


class RowParallelMissLinear(RowParallelMiss):
    def fold(self, x, r):
        if x.shape[-1] % r:
            x = nn.functional.pad(x, (0, r - x.shape[-1] % r))
        return x.reshape(*x.shape[:-1], x.shape[-1] // r, r).sum(-2)


def tag_loss(model, rows):
    return nn.functional.cross_entropy(
        model(rows["ids"]).flatten(0, 1), rows["tags"].flatten(), reduction="sum"
    )


class Clean:
    layer = RowParallelMiss

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 61)
        model = Tagger()
        config = MissConfig(r=R, target_modules=["down"], init_weights=False)
        model = inject_adapter_in_model(config, model)
        model.embed.requires_grad_(True)
        model.head.requires_grad_(True)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 62)
        return {
            "ids": torch.randint(VOCAB, (ROWS, LENGTH), generator=g),
            "tags": torch.randint(3, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows):
        return tag_loss(model, rows), rows["ids"].numel()

    def distribute(self, model, ctx):
        rank = ctx.coords["tp"]
        for block in model.blocks:
            block.group = ctx.group("tp")
            own = torch.arange(INNER).tensor_split(2)[rank]
            down = block.down
            for module, name, dim in (
                (block.up, "weight", 0),
                (block.up, "bias", 0),
                (down.base_layer, "weight", 1),
            ):
                cut = getattr(module, name).detach().index_select(dim, own)
                setattr(module, name, nn.Parameter(cut, requires_grad=False))
            down.__class__ = self.layer
            down.group, down.first_feature = ctx.group("tp"), int(own[0])
        return model

    def step(self, model, batch, ctx):
        own = {k: v.tensor_split(2)[ctx.coords["dp"]] for k, v in batch.items()}
        (tag_loss(model, own) / batch["ids"].numel()).backward()
        for name, p in model.named_parameters():
            if p.requires_grad:
                axes = ("dp", "tp") if "miss_block" in name else ("dp",)
                dist.all_reduce(p.grad, group=ctx.group(*axes))


class Buggy(Clean):
    layer = RowParallelMissLinear


EXPECT = dict(
    right=[
        r"miss|fold|adapter|group(s|ed|ing)?\b.{0,30}\br\b",
        (
            r"modulo|mod r|% ?r|remainder|align|offset|shift|first.?feature|(from|at) (zero|"
            r"0)|local (feature|number|index|position)|wrong row|global (feature|number|index|"
            r"position)|not (a )?(multiple|divisible)|boundar|pad"
        ),
    ],
    place=[r"\bfold\b", r"RowParallelMiss", r"miss_block", r"\bdown\b", r"first_feature"],
    wrong=[
        r"miss_block.{0,40}(not|never) (reduced|summed)",
        r"bias (is )?(added|counted) (twice|on every)",
        r"(lora|adapter)?.?scaling",
        r"CopyIn",
        r"(reduced|summed) (twice|again) over tp",
    ],
)
WHY = (
    "RowParallelMissLinear.fold reshapes the shard's own features into groups of r from its "
    "first feature on, so on the second tp rank feature 7 meets row 0 of miss_block instead of "
    "row 7 % 4 = 3, and so on: the folded input is rotated by three places. The second rank's "
    "part of the adapter's output is another function, so the gradients of miss_block, and "
    "through the forward those of embedding and head, are wrong; the first rank's part, the "
    "base projection and all reductions are right. If the cut were at a multiple of r nothing "
    "would be wrong. A right cause says that features are grouped by their local number, not "
    "aligned with the global number modulo r. The fix is to pad the shard in front by "
    "first_feature % r."
)
