"""A language model with forgetting attention (a sigmoid gate for each head and token; the score of
query i for key j gets the sum of the logarithms of the gates j+1 .. i), context parallel over three
ranks (11 tokens: 4, 3, 4), two micro-batches (two rows and one).

Keys, values and gates are gathered over cp in one message; each rank makes the decay of its own
queries out of the running sum.

Bug: the decay of the keys takes the running sum without the own element, so that gate j itself is
part of the decay from j to i (and the token's own key is no longer free of it). After ports of
decay matrices between an inclusive and an exclusive cumulative sum.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
WORDS, D, HEADS, T, ROWS = 13, 8, 2, 11, 3
CUTS = (0, 4, 7, T)


class GatherTime(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lo, group):
        ctx.lo, ctx.own, ctx.group = lo, x.shape[1], group
        full = x.new_zeros(x.shape[0], T, x.shape[2])
        full[:, lo : lo + x.shape[1]] = x
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g[:, ctx.lo : ctx.lo + ctx.own], None, None


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def attend(q, k, v, decay, first):
    """q from position `first` on; decay: rows, heads, queries, keys."""
    scores = heads(q) @ heads(k).transpose(-1, -2) * (D // HEADS) ** -0.5 + decay
    at = torch.arange(first, first + q.shape[1])
    scores = scores.masked_fill(torch.arange(k.shape[1]) > at[:, None], float("-inf"))
    return (scores.softmax(-1) @ heads(v)).transpose(1, 2).flatten(2)


class Forgetting(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.gate = nn.Linear(D, HEADS)
        self.out = nn.Linear(D, D)
        self.share = None

    def forward(self, x):
        h = self.norm(x)
        q, k, v = self.qkv(h).chunk(3, -1)
        log_gate = F.logsigmoid(self.gate(h))
        if self.share is None:
            total = log_gate.cumsum(1).transpose(1, 2)
            decay, first = total[..., :, None] - total[..., None, :], 0
        else:
            first, group, made = self.share
            full = GatherTime.apply(torch.cat([k, v, log_gate], -1), first, group)
            k, v, log_gate = full.split([D, D, HEADS], -1)
            decay = made(log_gate, first, q.shape[1])
        return x + self.out(attend(q, k, v, decay, first))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, D)
        self.layers = nn.ModuleList([Forgetting(), Forgetting()])
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, WORDS)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 11)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 110)
        ids = torch.randint(WORDS, (ROWS, T + 1), generator=g)
        return {"ids": ids[:, :-1], "next": ids[:, 1:]}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), rows["next"].flatten(), reduction="sum")
        return loss, rows["next"].numel()

    def decay(self, log_gate, first, own):
        total = log_gate.transpose(1, 2).cumsum(-1)
        of_query = total[..., first : first + own]
        return of_query[..., :, None] - total[..., None, :]

    def distribute(self, model, ctx):
        self.lo, self.hi = CUTS[ctx.coords["cp"] : ctx.coords["cp"] + 2]
        for layer in model.layers:
            layer.share = (self.lo, ctx.group("cp"), self.decay)
        return model

    def step(self, model, batch, ctx):
        count = batch["next"].numel()
        for part in torch.arange(ROWS).split(2):
            own = {k: v[part, self.lo : self.hi] for k, v in batch.items()}
            loss, _ = self.loss_sum(model, own)
            (loss / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("cp"))


class Buggy(Clean):
    def decay(self, log_gate, first, own):
        log_gate = log_gate.transpose(1, 2)
        total = log_gate.cumsum(-1)
        of_query, of_key = total[..., first : first + own], total - log_gate
        return of_query[..., :, None] - of_key[..., None, :]


EXPECT = dict(
    right=[
        r"decay|forget|gate|cumulative|cumsum|running sum|of_key",
        r"exclusive|inclusive|own (gate|element|key|forget|token)|itself|off.by.one|one (too|more)|"
        r"minus log_gate|total - log_gate|shift|extra|diagonal|subtract|j\s*\.\.\s*i",
    ],
    place=[r"\bdecay\b", r"of_key", r"total - log_gate", r"\bgate\b", r"layers\.\d"],
    wrong=[
        r"causal mask.{0,30}(wrong|shift|miss)",
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"GatherTime.{0,40}(wrong|miss|adjoint)",
        r"(first|offset|position).{0,30}(local|of the shard|start at zero|from zero)",
        r"earlier ranks?.{0,30}(miss|left out|not added)",
    ],
)
WHY = """The decay of query i for key j is the sum of log f over j+1 .. i, so both running sums are
inclusive. Buggy.decay subtracts log_gate from the running sum of the keys (an exclusive cumulative
sum), so that log f_j of the key itself is in it, and the diagonal is log f_i in place of 0. All the
ranks do it alike: the attention weights are wrong in the forward, and so are all gradients; gate
and qkv most. The communication and the masks are right. Fix: take `total` for the keys as well."""
