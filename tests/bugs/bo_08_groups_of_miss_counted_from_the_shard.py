"""peft's MiSS adapters (r = 4) on both linear layers of a residual two-layer scorer, in tensor parallelism by hand over three ranks: `up` is cut by its ten outputs (4, 3, 3), `down` by its ten inputs, with the
partial results summed. MiSS adds up the inputs i with the same i % r and multiplies the r sums with miss_block, so each rank adds its own inputs' sums, and down's miss_block, whole on each rank, has its gradient
summed over the ranks. Only the adapters and the head train. Two micro-batches of 4 and 3 rows, seen by all.

The bug: down's sharded adapter counts i from the beginning of its own inputs, which is right only where a shard begins at a multiple of r: 0 and 4, but not 7. After reports of tensor-parallel serving and
training of adapters whose group or block size doesn't divide the shard (Bone/MiSS, block quantised weights).
"""

import torch
import torch.distributed as dist
from peft import MissConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
WIDTH, MIDDLE, RANK, ROWS = 6, 10, 4, 7


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, MIDDLE)
        self.down = nn.Linear(MIDDLE, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(torch.tanh(x))[:, 0]


class SumPartial(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


def fold(x, places):
    """Sums of the inputs with the same place modulo r."""
    return x.new_zeros(*x.shape[:-1], RANK).index_add(-1, places % RANK, x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = MissConfig(
            r=RANK, target_modules=["up", "down"], modules_to_save=["head"], init_weights=False
        )
        return get_peft_model(Scorer(), config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {"x": torch.randn(ROWS, WIDTH, generator=g), "score": torch.randn(ROWS, generator=g)}

    def loss_sum(self, model, rows):
        return (model(rows["x"]) - rows["score"]).square().sum(), len(rows["x"])

    @staticmethod
    def bounds(ctx):
        own = torch.arange(MIDDLE).tensor_split(ctx.world_size)[ctx.rank]
        return int(own[0]), int(own[-1]) + 1

    def distribute(self, model, ctx):
        lo, hi = self.bounds(ctx)
        up, down = model.base_model.model.up, model.base_model.model.down

        def cut(owner, name, *where):
            p = getattr(owner, name) if isinstance(owner, nn.Linear) else owner[name]
            new = nn.Parameter(p.detach()[where].clone(), requires_grad=p.requires_grad)
            if isinstance(owner, nn.Linear):
                setattr(owner, name, new)
            else:
                owner[name] = new

        cut(up.base_layer, "weight", slice(lo, hi))
        cut(up.base_layer, "bias", slice(lo, hi))
        cut(up.miss_block, "default", slice(None), slice(lo, hi))
        cut(down.base_layer, "weight", slice(None), slice(lo, hi))
        return model

    def column_parallel(self, layer, x):
        y = F.linear(x, layer.base_layer.weight, layer.base_layer.bias)
        return y + fold(x, torch.arange(x.shape[-1])) @ layer.miss_block["default"]

    def row_parallel(self, layer, x, ctx):
        y = (
            F.linear(x, layer.base_layer.weight)
            + fold(x, self.places(x, ctx)) @ layer.miss_block["default"]
        )
        return SumPartial.apply(y, ctx.group("tp")) + layer.base_layer.bias

    def places(self, x, ctx):
        lo, hi = self.bounds(ctx)
        return torch.arange(lo, hi)

    def scores(self, model, x, ctx):
        net = model.base_model.model
        h = F.gelu(self.column_parallel(net.up, net.norm(x)))
        return net.head(torch.tanh(x + self.row_parallel(net.down, h, ctx)))[:, 0]

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in batch.items()}
            loss = (self.scores(model, part["x"], ctx) - part["score"]).square().sum()
            (loss / ROWS).backward()
        dist.all_reduce(
            model.base_model.model.down.miss_block["default"].grad, group=ctx.group("tp")
        )


class Buggy(Clean):
    def places(self, x, ctx):
        return torch.arange(x.shape[-1])


EXPECT = dict(
    right=[
        r"fold|group|place|modul|miss|position|index|offset|arange|adapter|row_parallel",
        r"rank 2|last rank|third rank|shard|own (inputs|part|columns)|local|offset|start|begin|\b7\b|places|ranks? \[?2",
    ],
    place=[
        r"\bplaces\b",
        r"row_parallel",
        r"\bfold\b",
        r"down.{0,20}miss|miss.{0,30}down",
        r"\bdown\b",
    ],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|missing (all.?)?reduc|wrong group",
        r"divisor|mean of means|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"bias .{0,20}(times|once per rank)|\bup\b.{0,25}(computes|is) wrong|column_parallel.{0,25}(computes|is) wrong|backward formula",
        r"ranks? 0.{0,40}(is|are|computes) wrong|all (three )?ranks.{0,20}(fold|group)",
    ],
)
WHY = (
    "Buggy.places numbers the inputs of down from zero on each rank; MiSS puts input i of all ten into group i % 4. Shards begin at 0, 4 and 7: on ranks 0 and 1 that makes no difference, on rank 2 the inputs 7, 8, 9 "
    "belong into groups 3, 0, 1 and go into 0, 1, 2. So rank 2's partial result of down's adapter is wrong before the sum, and after it the output on all ranks, the loss and the gradients of all trainable parameters; "
    "rank 2's own rows of miss_block get other inputs, and its up gets other columns back. up's output and down's base product are right everywhere, as are the sums. Fix: number from the shard's own start (lo)."
)
