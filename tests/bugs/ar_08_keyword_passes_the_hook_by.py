"""Tensor parallelism by hand on two ranks: a decoder block attends to an encoder's memory with three heads of which rank 0 has two and rank 1 one. The copy region of Megatron (same in the forward, sum over the ranks in the backward) is
set on the inputs of the attention by a forward pre-hook. Two micro-batches of two and three rows.

The bug: the decoder calls self.cross(x, memory=memory), and a pre-hook registered without with_kwargs=True sees positional arguments only. So the memory enters the sharded projections without the copy region, and each rank keeps only
its own heads' gradient for it. As in pytorch/pytorch PR 124114 (kwargs support for PrepareModuleInput of tensor parallelism) and PR 89389 (pre-hooks that take kwargs).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 2}}}}
ROWS, SOURCE, TARGET, WIDTH, HEADS, VOCABULARY, COLOURS = 5, 6, 4, 6, 3, 8, 5
HEADS_OF = [(0, 2), (2, 3)]
MICRO = [(0, 2), (2, 5)]


class CopyRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class CrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.heads, self.group = (0, HEADS), None

    def forward(self, x, memory):
        size = WIDTH // HEADS
        part = slice(self.heads[0] * size, self.heads[1] * size)
        q, k, v = (
            F.linear(y, f.weight[part], f.bias[part]).unflatten(-1, (-1, size)).transpose(1, 2)
            for y, f in ((x, self.query), (memory, self.key), (memory, self.value))
        )
        o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        o = F.linear(o, self.out.weight[:, part])
        return o if self.group is None else ReduceRegion.apply(o, self.group)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(COLOURS, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.memory_norm = nn.LayerNorm(WIDTH)
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.cross = CrossAttention()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source, target):
        memory = self.memory_norm(self.encoder(source))
        x = self.embed(target)
        x = x + self.cross(self.norm(x), memory=memory)
        return self.head(x)


def into_region(module, args, kwargs):
    copied = {k: CopyRegion.apply(v, module.group) for k, v in kwargs.items()}
    return tuple(CopyRegion.apply(x, module.group) for x in args), copied


def into_region_positional(module, args):
    return tuple(CopyRegion.apply(x, module.group) for x in args)


class Clean:
    with_kwargs = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "source": torch.randn(ROWS, SOURCE, COLOURS, generator=g),
            "target": torch.randint(VOCABULARY, (ROWS, TARGET), generator=g),
            "label": torch.randint(VOCABULARY, (ROWS, TARGET), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["source"], rows["target"]).flatten(0, 1)
        return F.cross_entropy(logits, rows["label"].flatten(), reduction="sum"), len(logits)

    def distribute(self, model, ctx):
        cross = model.cross
        cross.heads, cross.group = HEADS_OF[ctx.rank], ctx.group("tp")
        if self.with_kwargs:
            cross.register_forward_pre_hook(into_region, with_kwargs=True)
        else:
            cross.register_forward_pre_hook(into_region_positional)
        return model

    def step(self, model, batch, ctx):
        for low, high in MICRO:
            rows = {k: v[low:high] for k, v in batch.items()}
            loss, _ = self.loss_sum(model, rows)
            (loss / batch["label"].numel()).backward()
        for p in model.cross.parameters():
            dist.all_reduce(p.grad, group=ctx.group("tp"))


class Buggy(Clean):
    with_kwargs = False


EXPECT = dict(
    right=[
        r"(?i)encoder|memory",
        r"(?i)not (been )?(all.?)?(reduced|summed)|never (all.?)?(reduced|summed)|partial"
        r"|own (part|share"
        r"|head|slice)|missing|incomplete|copy.?region|only its|each rank (keeps|has)|sum over"
        r"|not add",
    ],
    place=[r"(?i)encoder|memory|cross"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(cross\.(query|key|value|out)|head|embed)(\.(weight|bias))? (is|are) wrong",
        r"(?i)(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)only (on )?rank \d\b|rank \d alone",
        r"(?i)recomput|detach",
    ],
)
WHY = (
    "The forward is right on both ranks. The pre-hook puts the copy region on x only; memory comes as a keyword and goes into key and value without it. In the backward the gradient of memory is therefore the one through the "
    "own heads (rank 0: heads 0 and 1, rank 1: head 2) and is never summed over the two ranks. So memory_norm and encoder (everything before memory) have partial gradients that differ between the ranks; their sum over the "
    "ranks is right. query, key, value, out (summed in the step), norm and embed (x has its copy region) and head are right, in all micro-batches. Divisor 20 is right. Fix: register the hook with with_kwargs=True and treat "
    "memory too (or pass memory by position)."
)
