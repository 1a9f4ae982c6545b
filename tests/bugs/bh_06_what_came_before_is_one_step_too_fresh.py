"""A retention language model (linear attention with a fixed decay for each head) with the sequence cut over three ranks into 5, 4 and 4 tokens; two micro-batches. Within a shard the products are weighted with decay^(i - j). What came
before is one matrix for each head, the decayed sum of keys times values of all earlier shards, taken from the gathered sums of the shards; a query reads it with the decay of its own place. Gradients are summed over the ranks, the divisor is the
number of tokens.

The bug: the query at place n of a shard reads the earlier state with decay^n, and not decay^(n + 1): the step from the last token of the shard before to the first of this one is not counted. After the inter-chunk decays of RetNet and
Lightning Attention (fla-org/flash-linear-attention issue 164 and the sequence parallel LASP).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
WORDS, WIDTH, HEADS, TOKENS, ROWS = 11, 8, 2, 13, 5
EDGES = [0, 5, 9, 13]
DECAY = [0.85, 0.6]
PARTS = [(0, 3), (3, 5)]


class Gather(torch.autograd.Function):
    """What every rank has, stacked; the gradients of all ranks are summed on the way back."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)], None


class Retention(nn.Module):
    def __init__(self):
        super().__init__()
        self.joint, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH // HEADS)
        self.shard, self.group, self.lead = None, None, 1

    def decayed(self, like, steps):
        rate = like.new_tensor(DECAY).view(-1, *[1] * steps.dim())
        return rate ** steps.to(like.dtype)

    def forward(self, x):
        q, k, v = self.joint(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        place = torch.arange(x.shape[1])
        steps = place[:, None] - place[None]
        weight = self.decayed(x, steps.clamp(min=0)) * (steps >= 0)
        seen = (q @ k.transpose(-1, -2) * weight) @ v
        if self.group is not None:
            left = self.decayed(x, len(place) - 1 - place)[..., None]
            sums = Gather.apply((k * left).transpose(-1, -2) @ v, self.group)
            state = torch.zeros_like(sums[0])
            for other in range(self.shard):
                gap = torch.tensor(EDGES[self.shard] - EDGES[other + 1])
                state = state + sums[other] * self.decayed(x, gap)[:, None, None]
            seen = seen + q @ state * self.decayed(x, place + self.lead)[..., None]
            seen = seen + 0 * sums.sum()
        return self.out(self.norm(seen).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Retention() for _ in range(2))
        self.wide = nn.Linear(WIDTH, WIDTH)
        self.words = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.words(x + F.silu(self.wide(x)))


class Clean:
    lead = 1

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        text = torch.randint(WORDS, (ROWS, TOKENS + 1), generator=g)
        return {"ids": text[:, :-1].clone(), "next": text[:, 1:].clone()}

    def loss_sum(self, model, rows):
        scores = model(rows["ids"]).flatten(0, 1)
        return F.cross_entropy(scores, rows["next"].flatten(), reduction="sum"), rows[
            "next"
        ].numel()

    def distribute(self, model, ctx):
        for layer in model.layers:
            layer.shard, layer.group, layer.lead = ctx.rank, ctx.group("cp"), self.lead
        return model

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        own = slice(EDGES[ctx.rank], EDGES[ctx.rank + 1])
        for low, high in PARTS:
            rows = {k: v[low:high, own] for k, v in batch.items()}
            loss, _ = self.loss_sum(model, rows)
            (loss / batch["next"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("cp"))


class Buggy(Clean):
    lead = 0


EXPECT = dict(
    right=[
        r"(?i)layers?\.?\[?0?|retention|decay|state|seen",
        r"(?i)ranks? 1|rank 0 (is|it is) right|right on rank 0|positions|earlier|state|other shard|5-|ranks \[?1",
        r"(?i)forward|decay|argument|other (value|number)|times|factor|power|off by one",
    ],
    place=[r"(?i)layers?\.0|retention|decayed|state|norm|seen"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"(?i)labels? .{0,20}(is|are) wrong|embed.{0,15}goes wrong|gather.{0,30}(wrong order|without grad|missing)",
        r"(?i)layers\.0.{0,40}rank 0.{0,15}(is|goes) wrong|backward formula|positions? (start|restart)",
    ],
)
WHY = (
    "In Retention.forward the state of the earlier shards is read with decay^place instead of decay^(place + 1) (`self.decayed(x, place + self.lead)`, lead 0): it comes with 1/0.85 times its weight in head 0 and 1/0.6 times in head 1. Wrong are "
    "ranks 1 and 2 (tokens 5-8 and 9-12), in the forward of both layers, in all micro-batches and rows; rank 0 has no earlier shard, its forward is right. What is within the shard (weight), the shards' sums, their gather and the gaps between shards "
    "are right, so is joint's output. The gradients of all parameters are wrong; that of the gathered sums (keys and values of rank 0 and 1) is, too. Sum over ranks and divisor 65 are right. Fix: place + 1."
)
