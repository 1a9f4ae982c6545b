"""The Forgetting Transformer (softmax attention with a forget gate: the score of query i and key j gets the sum of the log gates between them, c_i - c_j with c their running sum) under context parallelism: ten
tokens cut over three ranks (4, 3 and 3), keys, values and running sums gathered from all ranks. The running sum of a rank starts from the total of the ranks before it. Two micro-batches, gradients summed.

The bug: the queries' running sums start from the totals of the earlier ranks, but what is gathered for the keys are the sums that every rank began at zero: between ranks the decay is wrong by the total up to the
key's rank. After context-parallel ports of decay biases (forgetting attention, gated linear attention, ALiBi-like slopes), where the rotated block carries local sums.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, LENGTH, WORDS, WIDTH, HEADS, DIM, MICRO = 5, 10, 13, 6, 2, 3, 2


class GatherTime(torch.autograd.Function):
    """(b, own, ...) of all ranks along time; the ranks use it differently, gradients are summed."""

    @staticmethod
    def forward(fctx, own, lo, group):
        fctx.lo, fctx.n, fctx.group = lo, own.shape[1], group
        full = own.new_zeros(own.shape[0], LENGTH, *own.shape[2:])
        full[:, lo : lo + fctx.n] = own
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad[:, fctx.lo : fctx.lo + fctx.n], None, None


class TotalsOfRanks(torch.autograd.Function):
    """(b, h) of every rank, stacked in front."""

    @staticmethod
    def forward(fctx, own, rank, world, group):
        fctx.rank, fctx.group = rank, group
        full = own.new_zeros(world, *own.shape)
        full[rank] = own
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad[fctx.rank], None, None, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * DIM)
        self.gate = nn.Linear(WIDTH, HEADS)
        self.out = nn.Linear(HEADS * DIM, WIDTH)

    def project(self, x):
        x = self.norm(x)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(2)
        return q, k, v, F.logsigmoid(self.gate(x))

    def attend(self, x, q, k, v, cq, ck, lo):
        """cq: running sums of the queries' log gates (b, t, h), ck those of the keys."""
        scores = torch.einsum("bthd,bshd->bhts", q, k) * DIM**-0.5
        scores = scores + cq.transpose(1, 2)[..., None] - ck.transpose(1, 2)[:, :, None]
        ahead = torch.arange(k.shape[1]) > torch.arange(lo, lo + q.shape[1])[:, None]
        p = scores.masked_fill(ahead, float("-inf")).softmax(-1)
        return x + self.out(torch.einsum("bhts,bshd->bthd", p, v).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def loss_sum(self, model, rows):
        x = model.embed(rows["ids"])
        for block in model.blocks:
            q, k, v, f = block.project(x)
            c = f.cumsum(1)
            x = block.attend(x, q, k, v, c, c, 0)
        logits = model.head(x).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum")
        return loss, rows["labels"].numel()

    def decay(self, f, lo, ctx):
        """Running sums of the own queries, and those of all keys."""
        group = ctx.group("cp")
        totals = TotalsOfRanks.apply(f.sum(1), ctx.rank, ctx.world_size, group)
        c = f.cumsum(1) + totals[: ctx.rank].sum(0)[:, None]
        return c, GatherTime.apply(c, lo, group)

    def shard_loss(self, model, ids, labels, lo, ctx):
        group = ctx.group("cp")
        x = model.embed(ids)
        for block in model.blocks:
            q, k, v, f = block.project(x)
            k, v = GatherTime.apply(k, lo, group), GatherTime.apply(v, lo, group)
            cq, ck = self.decay(f, lo, ctx)
            x = block.attend(x, q, k, v, cq, ck, lo)
        return F.cross_entropy(model.head(x).flatten(0, 1), labels.flatten(), reduction="sum")

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        own = torch.arange(LENGTH).tensor_split(ctx.world_size)[ctx.rank]
        lo, hi = int(own[0]), int(own[-1]) + 1
        for n in range(MICRO):
            ids, labels = (batch[k].tensor_split(MICRO)[n][:, lo:hi] for k in ("ids", "labels"))
            loss = self.shard_loss(model, ids, labels, lo, ctx)
            (loss / batch["labels"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("cp"))


class Buggy(Clean):
    def decay(self, f, lo, ctx):
        group = ctx.group("cp")
        totals = TotalsOfRanks.apply(f.sum(1), ctx.rank, ctx.world_size, group)
        c = f.cumsum(1)
        return c + totals[: ctx.rank].sum(0)[:, None], GatherTime.apply(c, lo, group)


EXPECT = dict(
    right=[
        r"cumsum|running sum|cumulative|prefix|totals?|decay|gate|bias|\bck\b|\bc\b|offset",
        r"keys?|gathered|GatherTime|\bck\b|own (rank|shard|chunk|part|tokens)|local|each rank|every rank|start(s|ed|ing)? (at|from) (zero|0)|from zero|other ranks|remote|not (shifted|offset|added)|without|missing|lacks?|before (the )?(total|offset)|earlier ranks",
    ],
    place=[r"\bdecay\b", r"GatherTime", r"cumsum", r"totals", r"\bck\b|attend"],
    wrong=[
        r"(parameters?|gradient).{0,40}(not|never) reduced|reduced (twice|again)|missing (all.?)?reduc\w* of (the )?(gradient|parameter)",
        r"backward of (GatherTime|TotalsOfRanks).{0,40}(wrong|missing)|detach",
        r"causal mask|position ids|divisor|mean of means|own count",
        r"micro.?batch(es)? .{0,30}(lost|dropped|overwritten)|wrong group",
    ],
)
WHY = (
    "c_i - c_j is right only if both running sums are counted from the first token of the sequence. decay adds the totals of the earlier ranks to the queries' sums but gathers the keys' sums before that, each rank's "
    "counted from its own first token: keys on ranks 1 and 2 come without the totals before them, so queries of ranks 1 and 2 weigh the keys of rank 0 against the others wrongly (rank 0's queries see only rank 0 and are "
    "right). The forward is wrong on ranks 1 and 2, in both blocks and micro-batches, and all gradients after the sum. A right cause says that the gathered running sums of the keys are the ranks' own, without the offset. Fix: gather c after the totals are added."
)
