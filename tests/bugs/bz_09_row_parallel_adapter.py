"""Fine-tuning with MiSS adapters (peft) of a small language model under tensor parallelism on three ranks: up projections are cut by columns, down projections by rows (5 of 15 inputs each), the base weights are frozen,
norm and head are trained beside the adapters. MiSS adds to a linear's output the sums of its inputs over the classes "index modulo r" times an r x out matrix; on a row-parallel linear every rank sums its own inputs, the
outputs are added over the ranks, and the replicated matrix' gradients are, too. Two micro-batches.

The bug: the adapter's own forward counts the classes from the first input it sees, i.e. from the shard's start, and 5 is no multiple of r = 4, so that on ranks 1 and 2 the inputs meet the wrong rows. After reports
about peft adapters that are put on tensor-parallel linears without knowing the shard.
"""

import torch
import torch.distributed as dist
from peft import MissConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, LENGTH, VOCABULARY, WIDTH, INNER, RANK = 5, 6, 17, 8, 15, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down_proj(F.silu(self.up_proj(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.mix(self.embed(ids))[0]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = MissConfig(
            r=RANK, target_modules=["up_proj", "down_proj"], init_weights=False, miss_dropout=0.0
        )
        model = get_peft_model(Model(), config)
        for name, p in model.named_parameters():
            if ".norm." in name or ".head." in name:
                p.requires_grad_()
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"]).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum")
        return loss, rows["labels"].numel()

    def distribute(self, model, ctx):
        size, rank = ctx.axes["tp"], ctx.coords["tp"]

        def own(p, dim):
            part = p.detach().chunk(size, dim)[rank].clone()
            return nn.Parameter(part, requires_grad=p.requires_grad)

        for block in model.base_model.model.blocks:
            up, down = block.up_proj, block.down_proj
            up.base_layer.weight = own(up.base_layer.weight, 0)
            up.miss_block["default"] = own(up.miss_block["default"], 1)
            down.base_layer.weight = own(down.base_layer.weight, 1)
        return model

    def row_parallel(self, layer, h, ctx):
        """The rank's part of the adapted linear's output."""
        miss = layer.miss_block["default"]
        before = ctx.coords["tp"] * h.shape[-1] % RANK
        behind = -(before + h.shape[-1]) % RANK
        classes = F.pad(h, (before, behind)).unflatten(-1, (-1, RANK)).sum(-2)
        return layer.base_layer(h) + classes @ miss

    def step(self, model, batch, ctx):
        group, inner = ctx.group("tp"), model.base_model.model
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            ids, labels = (batch[k].tensor_split(2)[n] for k in ("ids", "labels"))
            x = inner.mix(inner.embed(ids))[0]
            for block in inner.blocks:
                h = F.silu(block.up_proj(Copy.apply(block.norm(x), group)))
                x = x + Reduce.apply(self.row_parallel(block.down_proj, h, ctx), group)
            logits = inner.head(x).flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
            (loss / batch["labels"].numel()).backward()
        for block in inner.blocks:
            dist.all_reduce(block.down_proj.miss_block["default"].grad, group=group)


class Buggy(Clean):
    def row_parallel(self, layer, h, ctx):
        return layer(h)


EXPECT = dict(
    right=[
        r"adapter|miss|down_proj|row.?parallel|peft",
        r"index|offset|class|modulo|shard|local|own (input|part|column)|start|position|shift|count(s|ed|ing)? from|forward|other value|wrong (row|input|value|product)|what ranks",
    ],
    place=[r"row_parallel", r"miss_block|MissLinear|miss", r"down_proj"],
    wrong=[
        r"(not|never) reduced|missing (all.?)?reduc|reduced (twice|again)|counted (twice|three times|3 times)",
        r"divisor|denominator|mean of means|wrong count",
        r"micro.?batch.{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"frozen|requires_grad|dropout",
        r"(Copy|Reduce)\.?(apply|backward)?.{0,40}(wrong|missing)|up_proj.{0,30}(is the cause|cut wrong)",
    ],
)
WHY = (
    "Input j of the down projection belongs to row j mod 4 of miss_block. Ranks 1 and 2 hold the inputs 5..9 and 10..14; peft's forward of the local layer counts them from 0, so that input 5 meets row 0 instead of 1 and "
    "input 10 row 0 instead of 2. The forward of both blocks is wrong by what ranks 1 and 2 add (rank 0's part is right), and so are the gradients of the down projections' miss_block and of all other trained parameters, "
    "on all ranks. A right cause says that the adapter on the row-parallel down projection uses shard-local input numbers (or that what ranks 1 and 2 add there is wrong). Fix: pad by the shard's offset modulo r."
)
