"""Context parallelism (cp 3, uneven: 5, 4 and 3 of 12 tokens) of a small gated causal convolution model (as the short convolutions of Mamba): in front of every convolution each rank is given the last three hidden states of the
rank before it, so that the window of kernel size 4 reaches over the cut; the exchange is an own autograd Function. Two micro-batches (2 and 3 rows), some labels are ignored.

The bug: the hand-over of the tails is a closed ring. The first rank, which has nothing before it and has to pad with zeros, gets the tail of the last rank: its first three tokens hear the end of the sequence. As in the review of
context-parallel convolutions (state-spaces/mamba PR 664 and issue 597, open-lm-engine PR 451: a permutation source -> destination for the tails, where the first rank has no source).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, TOKENS, WORDS, WIDTH, KERNEL = 5, 12, 9, 6, 4
CUTS = [0, 5, 9, 12]
MICRO = [(0, 2), (2, 5)]


class LeftHalo(torch.autograd.Function):
    """The last KERNEL - 1 states of the rank before; backward: back to their owner."""

    @staticmethod
    def forward(ctx, x, group, closed):
        ctx.group, ctx.closed, ctx.size = group, closed, x.shape[1]
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        tail = x[:, -(KERNEL - 1) :].contiguous()
        tails = [torch.empty_like(tail) for _ in range(world)]
        dist.all_gather(tails, tail, group=group)
        if rank == 0 and not closed:
            return torch.zeros_like(tail)
        return tails[rank - 1].clone()

    @staticmethod
    def backward(ctx, grad):
        rank, world = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        grads = [torch.empty_like(grad) for _ in range(world)]
        dist.all_gather(grads, grad.contiguous(), group=ctx.group)
        dx = grad.new_zeros(grad.shape[0], ctx.size, grad.shape[2])
        if rank < world - 1 or ctx.closed:
            dx[:, -(KERNEL - 1) :] = grads[(rank + 1) % world]
        return dx, None, None


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, KERNEL, groups=WIDTH)
        self.gate, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.group, self.closed = None, False

    def forward(self, x):
        h = self.norm(x)
        if self.group is None:
            before = h.new_zeros(h.shape[0], KERNEL - 1, WIDTH)
        else:
            before = LeftHalo.apply(h, self.group, self.closed)
        c = self.conv(torch.cat([before, h], 1).transpose(1, 2)).transpose(1, 2)
        return x + self.out(F.silu(c) * torch.sigmoid(self.gate(h)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mixers = nn.ModuleList(Mixer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        x = self.embed(ids)
        for mixer in self.mixers:
            x = mixer(x)
        return self.head(x)


def token_loss(logits, labels):
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


class Clean:
    closed = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        labels = torch.randint(WORDS, (ROWS, TOKENS), generator=g)
        labels[torch.rand(ROWS, TOKENS, generator=g) < 0.2] = -100
        labels[:, 1] = 3
        return {"ids": torch.randint(WORDS, (ROWS, TOKENS), generator=g), "labels": labels}

    def loss_sum(self, model, rows):
        return token_loss(model(rows["ids"]), rows["labels"]), int((rows["labels"] >= 0).sum())

    def distribute(self, model, ctx):
        for mixer in model.mixers:
            mixer.group, mixer.closed = ctx.group("cp"), self.closed
        return model

    def step(self, model, batch, ctx):
        rank = dist.get_rank(ctx.group("cp"))
        mine = slice(CUTS[rank], CUTS[rank + 1])
        count = int((batch["labels"] >= 0).sum())
        for low, high in MICRO:
            loss = token_loss(model(batch["ids"][low:high, mine]), batch["labels"][low:high, mine])
            (loss / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("cp"))


class Buggy(Clean):
    closed = True


EXPECT = dict(
    right=[
        r"(?i)conv|halo|mixer|tail|window|hand(ed|s)?.?over|neighbou?r",
        r"(?i)rank 0\b|first (rank|shard|part|chunk|slice|(three |3 )?tokens?|positions?)"
        r"|tokens? 0|positions? 0|beginning of the sequence|wraps?|closed ring",
    ],
    place=[r"(?i)mixers?(\.\d)?|conv|LeftHalo|halo"],
    wrong=[
        r"(?i)forward is right|forward .{0,20}(agrees|is correct)|wrong only in the backward",
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)labels? .{0,20}(is|are) (wrong|shifted)",
        r"(?i)(gate|norm|embed)\S* goes wrong first",
    ],
)
WHY = (
    "Rank 0 (tokens 0-4) should put zeros in front of its tokens, and puts the last three hidden states of rank 2 (tokens 9-11) there, in both mixers, for all rows of both micro-batches. The forward goes wrong on rank 0 at mixers.0.conv "
    "(input, first three positions; its tokens 0, 1, 2), in the second mixer for tokens 0-4 of rank 0 and, through the halo of mixers.1 (tokens 2-4 of rank 0), for token 5 of rank 1 (it reads token "
    "2) as well. The backward is the right adjoint of this wrong forward: "
    "rank 2 gets gradient for its tail from rank 0. The all-gather, the sum of the gradients over cp, the divisor (valid labels of all rows and shards) and the labels are right; all parameters get "
    "wrong gradients. Fix: rank 0 uses zeros, rank 2's "
    "tail goes nowhere."
)
