"""Soft mixture of experts (Soft MoE, from sparse to soft mixtures): seven experts of one slot each, dealt out over three ranks (3, 2 and 2), the tokens of a sequence cut over the same ranks (4, 3, 3). Each slot is a
softmax-weighted mean over all tokens, computed as sums over the own tokens; a reduce-scatter with uneven parts brings every rank the slots of its experts, an all-gather of padded parts brings the experts' outputs
to all tokens. Two micro-batches, gradients of what is replicated summed over the ranks.

The bug: the backward of the reduce-scatter gathers the slots' gradients in parts padded to the largest number (3), lays them one behind another and cuts the surplus off at the end, instead of cutting each part
to its own number. After the padded all_gather of uneven sizes in many code bases (mmdet/detectron2 gather, verl, uneven FSDP shards), where the padding in the middle stays in.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"ep": 3}}}}
ROWS, TOKENS, FEATURES, WIDTH, EXPERTS, CLASSES, MICRO = 5, 10, 4, 6, 7, 3, 2


def parts_of(n, world):
    return [len(p) for p in torch.arange(n).tensor_split(world)]


def padded_gather(x, sizes, group):
    """The first dimension of all ranks, each padded to the largest; a list of parts."""
    most = max(sizes)
    mine = x.new_zeros(most, *x.shape[1:])
    mine[: len(x)] = x
    parts = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(parts, mine, group=group)
    return parts


class GatherOutputs(torch.autograd.Function):
    """Experts' outputs to all ranks, whose tokens differ: the gradients are summed."""

    @staticmethod
    def forward(fctx, own, sizes, rank, group):
        fctx.lo, fctx.n, fctx.group = sum(sizes[:rank]), sizes[rank], group
        parts = padded_gather(own, sizes, group)
        return torch.cat([p[:n] for p, n in zip(parts, sizes)])

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad[fctx.lo : fctx.lo + fctx.n], None, None, None


class ScatterSlots(torch.autograd.Function):
    """Partial sums of all slots; every rank gets the whole sums of its own experts' slots."""

    @staticmethod
    def forward(fctx, partial, sizes, rank, group):
        fctx.sizes, fctx.group = sizes, group
        full = partial.clone()
        dist.all_reduce(full, group=group)
        return full[sum(sizes[:rank]) : sum(sizes[: rank + 1])].clone()

    @staticmethod
    def backward(fctx, grad):
        parts = padded_gather(grad, fctx.sizes, fctx.group)
        return torch.cat([p[:n] for p, n in zip(parts, fctx.sizes)]), None, None, None


class ReduceScatterSlots(ScatterSlots):
    @staticmethod
    def backward(fctx, grad):
        parts = padded_gather(grad, fctx.sizes, fctx.group)
        return torch.cat(parts)[: sum(fctx.sizes)], None, None, None


class SumTokens(torch.autograd.Function):
    """A sum over the ranks' tokens, used differently by every rank."""

    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad, None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class SoftMoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.phi = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, CLASSES)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return SoftMoE()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, TOKENS, FEATURES, generator=g),
            "y": torch.randn(ROWS, TOKENS, CLASSES, generator=g),
        }

    def loss_sum(self, model, rows):
        h = torch.tanh(model.stem(rows["x"]))
        logits = 2 * model.phi(h)
        slots = torch.einsum("bte,btd->ebd", logits.softmax(1), h)
        outputs = torch.stack([f(s) for f, s in zip(model.experts, slots)])
        out = h + torch.einsum("bte,ebd->btd", logits.softmax(-1), outputs)
        return (model.head(out) - rows["y"]).square().sum(), len(h)

    def distribute(self, model, ctx):
        sizes = parts_of(EXPERTS, ctx.world_size)
        lo = sum(sizes[: ctx.rank])
        for e in range(EXPERTS):
            if not lo <= e < lo + sizes[ctx.rank]:
                model.experts[e] = nn.Identity()
        return model

    def dispatch(self, partial, sizes, ctx):
        return ScatterSlots.apply(partial, sizes, ctx.rank, ctx.group("ep"))

    def micro_loss(self, model, x, y, ctx):
        group, sizes = ctx.group("ep"), parts_of(EXPERTS, ctx.world_size)
        lo = sum(sizes[: ctx.rank])
        h = torch.tanh(model.stem(x))
        logits = 2 * model.phi(h)
        weights = logits.exp()
        total = SumTokens.apply(weights.sum(1), group)
        partial = torch.einsum("bte,btd->ebd", weights / total[:, None], h)
        slots = self.dispatch(partial, sizes, ctx)
        own = torch.stack([model.experts[lo + i](s) for i, s in enumerate(slots)])
        outputs = GatherOutputs.apply(own, sizes, ctx.rank, group)
        out = h + torch.einsum("bte,ebd->btd", logits.softmax(-1), outputs)
        return (model.head(out) - y).square().sum()

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        for n in range(MICRO):
            x, y = (batch[k].tensor_split(MICRO)[n] for k in ("x", "y"))
            x, y = (t.tensor_split(ctx.world_size, dim=1)[ctx.rank] for t in (x, y))
            (self.micro_loss(model, x, y, ctx) / ROWS).backward()
        for module in (model.stem, model.phi, model.head):
            for p in module.parameters():
                dist.all_reduce(p.grad, group=ctx.group("ep"))


class Buggy(Clean):
    def dispatch(self, partial, sizes, ctx):
        return ReduceScatterSlots.apply(partial, sizes, ctx.rank, ctx.group("ep"))


EXPECT = dict(
    right=[
        r"pad|uneven|unequal|own (number|size|length)|sizes|offset|shift|misalign|place|position|row|order|slot|cut|trim|surplus|layout|zeros",
        r"backward|gradient|adjoint|way back|cotangent",
        r"pad|trim|cut|misalign|shift|offset|wrong (place|row|slot|position|order|expert)|other (place|row|slot|position|expert)|misplaced|uneven|unequal|not the adjoint|lost|dropped|surplus|moved",
    ],
    place=[r"ReduceScatterSlots", r"padded_gather", r"torch\.cat", r"dispatch", r"all.?gather"],
    wrong=[
        r"reduc\w*.{0,30}(missing|twice|again)|missing.{0,30}(sum|reduc)|(not|never) (summed|reduced)",
        r"counted (twice|two times)|times too|divisor|mean of means|averag",
        r"forward .{0,20}(is )?wrong|GatherOutputs.{0,60}(wrong|missing)|SumTokens.{0,60}(wrong|missing)|own tokens only|local softmax",
        r"micro.?batch(es)? .{0,30}(lost|dropped|overwritten)",
    ],
)
WHY = (
    "The slots are dealt out as 3, 2 and 2; ReduceScatterSlots.backward gathers parts padded to three rows and takes the first seven rows of what lies one behind another: rows 0-4 are right, row 5 is rank 1's padding "
    "(zeros), row 6 is the gradient of slot 5, and that of slot 6 is lost. So the gradients of slots 5 and 6 (experts of rank 2) reach the tokens at the wrong slots, on all three ranks and in both micro-batches: stem "
    "and phi are wrong, the experts, the head and the forward are right. A right cause names the padding that is not cut from each part in the backward's gather, or the misplaced slots. Fix: cut every part to its size before cat."
)
