"""Adapter tuning of a small text classifier under tensor parallelism on three ranks: four residual MLP blocks whose inner features (eleven: 4, 4 and 3 a rank) are cut in columns and rows; the MLPs of the
first three blocks are frozen, the last one's is trained, with a replicated bottleneck adapter after each block, learnt places and a head. Two micro-batches of three and two sentences. The column-parallel
product is an autograd function of our own, and one for frozen weights that doesn't compute their gradient.

The bug: the frozen variant hands back the gradient of its input without summing it over the ranks, so each rank goes on with the part that came through its own columns. After Megatron-LM's
LinearWithFrozenWeight and the issues about its all-reduce of the input gradient (frozen trunks, LoRA and adapters under tensor parallelism).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
WORDS, WIDTH, INNER, NECK, BLOCKS, LENGTH, CLASSES, ROWS = 14, 8, 11, 3, 4, 6, 4, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.squeeze = nn.Linear(WIDTH, NECK)
        self.widen = nn.Linear(NECK, WIDTH)

    def mlp(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x, mlp=None):
        x = x + (mlp or self.mlp)(self.norm(x))
        return x + self.widen(torch.tanh(self.squeeze(x)))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.3)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES)
        for part in [self.words] + [
            m for block in self.blocks[:-1] for m in (block.norm, block.up, block.down)
        ]:
            part.requires_grad_(False)

    def forward(self, ids, mlps=None):
        x = self.words(ids) + self.places
        for n, block in enumerate(self.blocks):
            x = block(x, mlps and mlps[n])
        return self.head(x.amax(1))


class ByColumns(torch.autograd.Function):
    """A product with the columns (output features) that this rank holds of a weight."""

    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        to_input = grad @ weight
        work = dist.all_reduce(to_input, group=ctx.group, async_op=True)
        rows = grad.flatten(0, -2)
        to_weight = rows.t() @ x.flatten(0, -2)
        work.wait()
        return to_input, to_weight, rows.sum(0), None


class ByFrozenColumns(torch.autograd.Function):
    """The same with a weight that isn't trained: no gradient of it, and its input needn't be kept."""

    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.save_for_backward(weight)
        ctx.group = group
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        to_input = grad @ weight
        dist.all_reduce(to_input, group=ctx.group)
        return to_input, None, None, None


class ByFrozenColumnsAlone(ByFrozenColumns):
    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return grad @ weight, None, None, None


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Clean:
    frozen = ByFrozenColumns

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Classifier()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["ids"]), rows["label"], reduction="sum"), len(
            rows["label"]
        )

    def distribute(self, model, ctx):
        def own(p, dim):
            return nn.Parameter(
                p.detach().tensor_split(3, dim)[ctx.rank].clone(), requires_grad=p.requires_grad
            )

        for block in model.blocks:
            block.up.weight, block.up.bias = own(block.up.weight, 0), own(block.up.bias, 0)
            block.down.weight = own(block.down.weight, 1)
        return model

    def mlp(self, block, group):
        product = ByColumns if block.up.weight.requires_grad else self.frozen

        def run(x):
            x = F.gelu(product.apply(x, block.up.weight, block.up.bias, group))
            return SumOverRanks.apply(F.linear(x, block.down.weight), group) + block.down.bias

        return run

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mlps = [self.mlp(block, ctx.group("tp")) for block in model.blocks]
        for ids, label in zip(
            batch["ids"].tensor_split(2), batch["label"].tensor_split(2), strict=True
        ):
            (F.cross_entropy(model(ids, mlps), label, reduction="sum") / ROWS).backward()


class Buggy(Clean):
    frozen = ByFrozenColumnsAlone


EXPECT = dict(
    right=[
        r"backward|gradient of (its|the) input|input gradient|grad_input|to_input|way back|sends? back|hands? back|upstream",
        r"frozen|ByFrozenColumns|column|\bup\b|mlp",
        r"(not|never|no|without|missing|lacks?|un)\W{0,3}.{0,30}(reduc|sum)|partial|own (part|columns|share)|local|its part|differ",
    ],
    place=[r"ByFrozenColumns", r"frozen", r"\bup\b", r"blocks\.[12]", r"\bmlp\b"],
    wrong=[
        r"forward (is|computes|formula) .{0,20}wrong",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"ByColumns\b.{0,30}(wrong|missing)|data.?parallel|(reduced|summed) (twice|again)",
    ],
)
WHY = (
    "ByFrozenColumnsAlone.backward returns grad @ weight of the own columns only; the input is replicated, so the parts of all three ranks must be summed (all-reduce over tp), as ByColumns does for trained weights. "
    "Blocks 0 to 2 are frozen, so what goes back below the MLP of blocks 2, 1 (and 0) lacks the other ranks' parts, while the residual path is whole: the gradients of the adapters (squeeze, widen) of blocks 0 and 1 and "
    "of places are wrong and differ between the ranks. Head, block 3 and the adapter of block 2 are right, as are forward and loss. Adding an all-reduce of these parameters' gradients would be wrong, too, for the residual "
    "part is on each rank in full. Fix: all-reduce the input gradient in the frozen variant."
)
