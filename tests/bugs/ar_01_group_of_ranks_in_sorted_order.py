"""Context parallelism by hand on three ranks that sit on a chain of links 2 - 0 - 1: part i of every sequence is held by rank ORDER[i], keys and values are gathered over a group made with dist.new_group(ORDER), attention is causal,
positions are learned. Three micro-batches of two, two and one rows, ignored labels, gradients summed over the three ranks.

The bug: the author takes the place in the list given to new_group for the rank in the group. new_group sorts its list, so all_gather returns the parts in the order of the ranks 0, 1, 2 and not of the sequence. As in pytorch/pytorch
issue 176126 (new_group runs ranks = sorted(ranks), the order of the caller is lost).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ORDER = [2, 0, 1]
ROWS, TOKENS, VOCABULARY, WIDTH, HEADS, MICRO = 5, 12, 11, 8, 2, 2


class GatherSequence(torch.autograd.Function):
    """The whole sequence from its parts; backward: the sum of all gradients of the own part."""

    @staticmethod
    def forward(ctx, x, group, place, reorder):
        ctx.group, ctx.place = group, place
        parts = [torch.empty_like(x) for _ in ORDER]
        dist.all_gather(parts, x.contiguous(), group=group)
        if reorder:
            parts = [parts[r] for r in ORDER]
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(len(ORDER), 2)[ctx.place].contiguous(), None, None, None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.group, self.place, self.reorder = None, 0, True

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        if self.group is not None:
            k = GatherSequence.apply(k, self.group, self.place, self.reorder)
            v = GatherSequence.apply(v, self.group, self.place, self.reorder)
        first = self.place * x.shape[1]
        rows = first + torch.arange(x.shape[1], device=x.device)
        seen = torch.arange(k.shape[2], device=x.device)[None] <= rows[:, None]
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return x + self.out(o.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.5)
        self.attention = Attention()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, first=0):
        x = self.embed(ids) + self.places[first : first + ids.shape[1]]
        return self.head(self.norm(self.attention(x)))


def token_loss(logits, labels):
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


class Clean:
    reorder = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        labels = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g)
        prompt = torch.tensor([0, 3, 1, 5, 2])
        labels[torch.arange(TOKENS)[None] < prompt[:, None]] = -100
        return {"ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g), "labels": labels}

    def loss_sum(self, model, rows):
        valid = int((rows["labels"] != -100).sum())
        return token_loss(model(rows["ids"]), rows["labels"]), valid

    def distribute(self, model, ctx):
        attention = model.attention
        attention.group = dist.new_group(ORDER)
        attention.place, attention.reorder = ORDER.index(ctx.rank), self.reorder
        return model

    def step(self, model, batch, ctx):
        size = TOKENS // len(ORDER)
        first = ORDER.index(ctx.rank) * size
        mine = slice(first, first + size)
        valid = int((batch["labels"] != -100).sum())
        for part in torch.arange(ROWS).split(MICRO):
            logits = model(batch["ids"][part, mine], first)
            (token_loss(logits, batch["labels"][part, mine]) / valid).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("cp"))


class Buggy(Clean):
    reorder = False


EXPECT = dict(
    right=[
        r"(?i)attention|gather|keys?\b|values?\b",
        r"(?i)order|permut|sort|place|position|other rank|another rank|wrong (rank|part|shard"
        r"|token|row)"
        r"|mis.?plac|swap|foreign|exchang|slice",
    ],
    place=[r"(?i)attention|GatherSequence|gather"],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
        r"(?i)labels? .{0,20}(is|are) (wrong|shifted)",
        r"(?i)forward is right|wrong only in the backward",
        r"(?i)only (on )?rank \d|rank \d alone",
        r"(?i)without (a )?grad|detach",
    ],
)
WHY = (
    "The list ORDER = [2, 0, 1] says which rank holds which part of the sequence; dist.new_group sorts it, so the group's ranks are 0, 1, 2 and all_gather returns the parts of rank 0 (tokens 4-7), rank 1 (tokens 8-11), rank 2 "
    "(tokens 0-3). GatherSequence joins them in that order, so that keys and values are permuted by whole parts on every rank while the causal mask counts places: the forward of attention goes wrong on all ranks, all rows and "
    "micro-batches. The backward takes slice ORDER.index(rank) of the summed gradient, which is the gradient of another rank's keys and values. Ids, labels, position table, divisor, accumulation and the all-reduce of the "
    "parameters are right. Wrong gradients: attention.* and embed, places; norm and head too, since their inputs are wrong. Fix: parts = [parts[r] for r in ORDER] (or slice and join both by the rank in the group)."
)
