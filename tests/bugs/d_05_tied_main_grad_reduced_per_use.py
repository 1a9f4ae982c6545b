"""Fused accumulation into main_grad, reduced by a callback when a layer's gradient is ready; the
token table is also the output layer. After FAULTS C11-09 (DeepSpeed PR 7534): the callback fires
once per tied layer, and what is in the buffer is reduced again.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}

ROWS, LENGTH, WIDTH, HEADS, VOCABULARY = 9, 4, 8, 2, 15


def add(weight, grad):
    """Into main_grad where there is one (then autograd gets nothing), else to autograd."""
    if not hasattr(weight, "main_grad"):
        return grad
    weight.main_grad.add_(grad)
    weight.on_ready(weight)
    return None


class FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad @ ctx.weight, add(ctx.weight, grad.flatten(0, -2).T @ x.flatten(0, -2))


class FusedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, ids):
        ctx.weight, ctx.ids = weight, ids
        return weight[ids]

    @staticmethod
    def backward(ctx, grad):
        zeros = torch.zeros_like(ctx.weight)
        grad = zeros.index_add_(0, ctx.ids.flatten(), grad.flatten(0, -2))
        return add(ctx.weight, grad), None


class Linear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x):
        return FusedLinear.apply(x, self.weight)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = Linear(WIDTH, 3 * WIDTH), Linear(WIDTH, WIDTH)
        self.up, self.down = Linear(WIDTH, 11), Linear(11, WIDTH)

    def forward(self, x):
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, WIDTH) / 2)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids):
        x = FusedEmbedding.apply(self.table, ids)
        for block in self.blocks:
            x = block(x)
        return FusedLinear.apply(self.norm(x), self.table)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows):
        logits, labels = model(rows["ids"]).flatten(0, 1), rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()

    def distribute(self, model, ctx):
        self.fused = {"table": 2}
        for name, param in model.named_parameters():
            if name == "table" or (".norm" not in name and not name.startswith("norm")):
                param.main_grad = torch.zeros_like(param)
                param.uses = self.fused.get(name, 1)
                param.on_ready = lambda p: self.ready(p, ctx)
        return model

    def ready(self, param, ctx):
        param.waiting -= 1
        if param.waiting == 0:
            dist.all_reduce(param.main_grad, group=ctx.group("dp"))

    def gradient_of(self, name, param, ctx):
        return getattr(param, "main_grad", param.grad)

    def step(self, model, batch, ctx):
        for param in model.parameters():
            if hasattr(param, "main_grad"):
                param.main_grad.zero_()
                param.waiting = param.uses
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / (ROWS * LENGTH)).backward()
        for param in model.parameters():
            if not hasattr(param, "main_grad"):
                dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def ready(self, param, ctx):
        dist.all_reduce(param.main_grad, group=ctx.group("dp"))


EXPECT = dict(
    right=[
        r"\btable\b",
        r"tied|shared|twice|two (uses|reductions|all)|again|repeated|more than once|several times"
        r"|4 times|four times|times 4|(x|by) ?4|\b4(\.0+)?\b|use of|part|counted|too large|head|output layer",
    ],
    place=[r"\btable\b", r"all.?reduce"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"averag",
        r"blocks\S* (is|are|has|have) (wrong|reduced|counted)",
        r"forward (pass )?(is wrong|differs)",
        r"rows? .{0,30}(lost|missing|dropped)",
    ],
)

WHY = (
    "The table's buffer is all-reduced after its use as output layer and, with the sum in it, "
    "again after its use as embedding: the output part counts four times, the input part once."
)
