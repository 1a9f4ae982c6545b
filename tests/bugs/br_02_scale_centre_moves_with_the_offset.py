"""A causal language model with xPos positions (rotation plus a decay of each channel, inverse for keys), eleven tokens cut over three context parallel ranks (4, 4 and 3). Keys and values are gathered, queries are the
rank's own. Two micro-batches; gradients are summed over the ranks.

The bug: the xPos module is called with the shard's offset, as for decoding with a cache. There the exponent is centred at (length + offset) // 2 - the middle of all that has been seen up to the end of this call - so
that each shard has a centre of its own and the scales of keys and queries of different shards do not belong together. After torchscale's XPOS.forward(x, offset) in context parallel use.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, LENGTH, VOCABULARY, WIDTH, HEADS, BASE = 5, 11, 13, 8, 2, 6
HEAD = WIDTH // HEADS


def turn(x, angle):
    a, b = x[..., 0::2], x[..., 1::2]
    c, s = angle.cos(), angle.sin()
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)


class XPOS(nn.Module):
    def __init__(self):
        super().__init__()
        i = torch.arange(0, HEAD, 2).double()
        self.register_buffer("zeta", (i + 0.4 * HEAD) / (1.4 * HEAD), persistent=False)
        self.register_buffer("freq", 20.0 ** (-i / HEAD), persistent=False)

    def apply_at(self, x, positions, centre, downscale):
        power = (positions - centre).to(x.dtype)[:, None] / BASE
        scale = self.zeta.to(x.dtype) ** power
        if downscale:
            scale = 1 / scale
        y = turn(x, positions.to(x.dtype)[:, None] * self.freq.to(x.dtype))
        return y * scale.repeat_interleave(2, -1)

    def forward(self, x, offset=0, downscale=False):
        length = x.shape[-2]
        positions = torch.arange(offset, offset + length)
        return self.apply_at(x, positions, (length + offset) // 2, downscale)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 13), nn.GELU(), nn.Linear(13, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.xpos = XPOS()

    def parts(self, x):
        return [
            t.unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        ]

    def attend(self, q, k, v, offset=0):
        seen = torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None] + offset
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    def rest(self, x, y):
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return self.head(x + self.mlp(x))

    def forward(self, ids):
        x = self.embed(ids)
        q, k, v = self.parts(x)
        return self.rest(x, self.attend(self.xpos(q), self.xpos(k, downscale=True), v))


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(fctx, own, lo, hi, group):
        fctx.place, fctx.group = (lo, hi), group
        full = own.new_zeros(*own.shape[:2], LENGTH, own.shape[3])
        full[:, :, lo:hi] = own
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad[:, :, slice(*fctx.place)], None, None, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss_sum(self, model, rows):
        labels = rows["labels"].flatten()
        return F.cross_entropy(
            model(rows["ids"]).flatten(0, 1), labels, reduction="sum"
        ), labels.numel()

    def positioned(self, model, q, k, lo, hi):
        places = torch.arange(lo, hi)
        return (
            model.xpos.apply_at(q, places, LENGTH // 2, False),
            model.xpos.apply_at(k, places, LENGTH // 2, True),
        )

    def step(self, model, batch, ctx):
        own = torch.arange(LENGTH).tensor_split(ctx.world_size)[ctx.rank]
        lo, hi = int(own[0]), int(own[-1]) + 1
        group = ctx.group("cp")
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            ids, labels = (batch[k].tensor_split(2)[n][:, lo:hi] for k in ("ids", "labels"))
            x = model.embed(ids)
            q, k, v = model.parts(x)
            q, k = self.positioned(model, q, k, lo, hi)
            k, v = (GatherSequence.apply(t, lo, hi, group) for t in (k, v))
            logits = model.rest(x, model.attend(q, k, v, lo)).flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
            (loss / (ROWS * LENGTH)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def positioned(self, model, q, k, lo, hi):
        return model.xpos(q, offset=lo), model.xpos(k, offset=lo, downscale=True)


EXPECT = dict(
    right=[
        r"xpos|scale|centre|center|decay|position|offset|power|zeta|exponent",
        r"(own|local|each|its|per.?rank|per.?shard|shard|rank|offset|chunk|stretch|different|other|cp).{0,100}(centre|center|scale|position|length|offset|xpos|power|exponent)"
        r"|(centre|center|scale|position|length|offset|xpos|power|exponent).{0,100}(own|local|each|shard|rank|chunk|stretch|differ|cp)",
    ],
    place=[r"positioned", r"xpos", r"apply_at", r"GatherSequence|keys?\b|quer(y|ies)"],
    wrong=[
        r"(not|never) reduced|missing (all.?)?reduc|counted twice|divided twice",
        r"causal mask is|wrong labels|adjoint of the gather|GatherSequence.{0,20}backward is wrong",
        r"positions? (start|begin|restart)s? (at|from) (zero|0)",
    ],
)
WHY = (
    "xPos multiplies a query at place m by zeta**((m - c) / base) and a key at place n by the inverse, so that only m - n is left if c is the same everywhere. Called with offset = lo, the module centres at "
    "(length of the shard + lo) // 2, which is 2, 4 and 5 on the ranks 0, 1 and 2 (one process: 5). Scores between tokens of different shards get a wrong factor zeta**(difference of centres / base), so the "
    "gradients of ranks 1 and 2, and through keys also of rank 0, are wrong; rotation, mask, collectives and divisor are right. A right cause names the xPos scale (positions/centre) of each shard. Fix: one centre, "
    "LENGTH // 2, on all ranks."
)
