"""A Performer (FAVOR+) encoder layer with its sequence cut over three ranks of a context-parallel group: positive random features of keys are summed into one state per head, the states are summed over the
ranks, and each rank answers its own queries. Two micro-batches; the gradients are summed over the ranks. As in the original code keys are stabilised by their largest exponent (over all positions and features of
a head) and 1e-2 is added to every feature.

The bug: each rank stabilises its keys by the largest exponent of its OWN positions, so that the states which are added over the ranks are in unlike units exp(-max). With the whole sequence on one rank the
constant (nearly) cancels between numerator and denominator; with a sum over ranks it does not. After reports on sequence-parallel linear attention/Performer ports, where amax over the time axis became local.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, LENGTH, VOCABULARY, WIDTH, HEADS, FEATURES, EPS = 5, 11, 13, 10, 2, 6, 1e-2


class SumState(torch.autograd.Function):
    """Sum of the ranks' states; every rank reads it with its own queries, so the gradients are summed too."""

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


class Performer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 17), nn.GELU(), nn.Linear(17, WIDTH)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("omega", torch.randn(HEADS, WIDTH // HEADS, FEATURES))

    def exponents(self, x):
        return torch.einsum("bhld,hdf->bhlf", x, self.omega) - x.square().sum(-1, keepdim=True) / 2

    def forward(self, ids, positions, key_offset, over_ranks):
        x = self.embed(ids) + self.place(positions)
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(2 * self.norm(x)).chunk(3, -1)
        )
        q, k = self.exponents(q), self.exponents(k)
        q = torch.exp(q - q.amax(-1, keepdim=True).detach()) + EPS
        k = torch.exp(k - key_offset(k.detach())) + EPS
        state = over_ranks(k.transpose(-1, -2) @ v)
        total = over_ranks(k.sum(-2))
        y = (q @ state) / (q @ total[..., None])
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return self.head(x + self.mlp(x))


def largest(exponents):
    return exponents.amax((-1, -2), keepdim=True)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Performer()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], torch.arange(LENGTH), largest, lambda state: state)
        return F.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum"
        ), rows["ids"].numel()

    def key_offset(self, exponents, group):
        offset = largest(exponents)
        dist.all_reduce(offset, op=dist.ReduceOp.MAX, group=group)
        return offset

    def step(self, model, batch, ctx):
        group = ctx.group("cp")
        positions = torch.arange(LENGTH).tensor_split(ctx.axes["cp"])[ctx.coords["cp"]]
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            ids, labels = (batch[k].tensor_split(2)[n][:, positions] for k in ("ids", "labels"))
            logits = model(
                ids,
                positions,
                lambda exponents: self.key_offset(exponents, group),
                lambda state: SumState.apply(state, group),
            )
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            (loss / batch["ids"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def key_offset(self, exponents, group):
        return largest(exponents)


EXPECT = dict(
    right=[
        r"max|largest|stabili[sz]|offset|key_offset|exponent|amax|normali[sz]|scale|shift",
        r"own|local|shard|not (all.?)?reduced|missing.{0,40}reduc|each rank|per.rank|every rank|unlike|differ|lacks|absent|without",
    ],
    place=[
        r"key_offset",
        r"largest",
        r"\bk\b|keys?",
        r"exponents",
        r"SumState|over_ranks|state",
        r"all_reduce.{0,30}max|ReduceOp\.MAX|\bMAX\b",
    ],
    wrong=[
        r"backward of SumState.{0,30}wrong|gradients? of .{0,30}parameters? .{0,20}(not|never) reduced",
        r"micro.?batch(es)?.{0,30}(lost|dropped|overwritten)|reduced twice",
        r"divisor|token count|mean of means|labels.{0,20}(shift|wrong)|positions?.{0,20}(wrong|from zero|restart)",
    ],
)
WHY = (
    "key_offset has to be the largest exponent over all positions of the sequence, on all ranks; in the buggy twin the MAX all-reduce is missing and each rank subtracts the largest of its own 4, 4 or 3 positions. "
    "The features of each shard are thus multiplied by exp(own max) relative to the others before the states are added: a rank with a small largest key has too much weight, and attention output, loss and gradients are wrong on all ranks. "
    "A right cause says that the stabiliser (max) of the keys is local to the shard. Fix: all_reduce(offset, MAX) over cp before the exponential."
)
