"""LoRA on a tensor parallel feed-forward net: the adapter of the row-parallel layer has its A cut along the inputs, so what comes out of A
is a part of a sum. After reports on LoRA beside Megatron's RowParallelLinear (PEFT's LoraParallelLinear, Megatron-Bridge PR 5900 in FAULTS
C05-12, vLLM): the adapter's output is added to the base layer's, which is already summed.
"""

import types

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, LENGTH, WORDS, WIDTH, HIDDEN, RANK, CLASSES = 8, 5, 19, 7, 10, 2, 4


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def same(x):
    return x


ONE = types.SimpleNamespace(copy=same, reduce=same, reduce_adapter=same)


def local(param):
    return param.to_local() if isinstance(param, DTensor) else param


class LoraLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5, requires_grad=False)
        self.a = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5)
        self.b = nn.Parameter(0.4 * torch.randn(outputs, RANK))

    def column(self, x, tp):
        low = tp.copy(F.linear(x, self.a))
        return F.linear(tp.copy(x), local(self.weight)) + F.linear(low, local(self.b))

    def row(self, x, tp):
        low = tp.reduce_adapter(F.linear(x, local(self.a)))
        return tp.reduce(F.linear(x, local(self.weight))) + F.linear(low, self.b)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.up, self.down = LoraLinear(WIDTH, HIDDEN), LoraLinear(HIDDEN, WIDTH)

    def forward(self, x, tp):
        return x + self.down.row(F.silu(self.up.column(self.norm(x), tp)), tp)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(FeedForward() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids, mask, tp=ONE):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, tp)
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class Clean:
    reduce_adapter = staticmethod(Reduce.apply)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Classifier()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
            "mask": torch.arange(LENGTH) < lengths,
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows, tp=ONE):
        logits = model(rows["ids"], rows["mask"], tp)
        return F.cross_entropy(logits, rows["y"], reduction="sum"), len(rows["y"])

    def distribute(self, model, ctx):
        for block in model.blocks:
            cuts = (
                (block.up, "weight", 0),
                (block.up, "b", 0),
                (block.down, "weight", 1),
                (block.down, "a", 1),
            )
            for layer, name, dim in cuts:
                whole = getattr(layer, name)
                shard = distribute_tensor(whole.detach(), ctx.mesh, [Shard(dim)])
                setattr(layer, name, nn.Parameter(shard, requires_grad=whole.requires_grad))
        return model

    def step(self, model, batch, ctx):
        tp = types.SimpleNamespace(
            copy=Copy.apply, reduce=Reduce.apply, reduce_adapter=self.reduce_adapter
        )
        loss, count = self.loss_sum(model, batch, tp)
        (loss / count).backward()


class Buggy(Clean):
    reduce_adapter = staticmethod(same)


EXPECT = dict(
    right=[r"forward|output|activation|value|differ\w*|logits", r"down|blocks\.0|adapter|lora"],
    place=[r"blocks\.0", r"down", r"adapter|lora", r"(all|every|each) ranks?|ranks? \W?[012]"],
    wrong=[
        r"forward (pass )?(is|was) (right|exact|correct)$",
        r"(output|forward) of (the )?(words|blocks\.0\.norm|blocks\.0\.up)\S* (is|was) wrong|first wrong .{0,20}(words|norm|up\b)",
        r"(counted|reduced|summed) (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"blocks\.1\S* .{0,20}first wrong",
        r"(divided|normali[sz]ed) by (its|the|their) own",
    ],
)
WHY = (
    "Each rank adds B times its own part of A's output (from its 4, 4 or 2 hidden units) to a base output that is summed over the "
    "ranks, so the forward is wrong from blocks.0.down on and differs between the ranks, which should hold equal activations. All "
    "trained gradients are wrong, and the replicated ones behind it (down.b, blocks.1.up.a, head) differ between ranks."
)
