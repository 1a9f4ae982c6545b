"""A mixture-of-experts decoder (5 experts, top 2) with the sequence-wise balance loss of
DeepSeek-V3, on dp 2 x cp 2 (3 sequences a replica, 7 tokens: 4 and 3), micro-batches of two
sequences and one.

The balance of one sequence is the sum over experts of (share of its choices) x (mean of its
normalised scores). Under cp both come from sums over the cp ranks.

Bug: the sums of choices and scores go over the group in which the gradients are summed (dp and cp
together), so that the n-th sequence is mixed with the n-th sequence of the other replica. After
Megatron-like code in which `data_parallel_group(with_context_parallel=True)` is taken where the
context parallel group is meant.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "cp": 2}}}}
WORDS, D, H, EXPERTS, TOP, T, ROWS, ALPHA = 12, 6, 5, 5, 2, 7, 6, 0.3
CUTS = (0, 4, T)


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


class SumOverRanks(torch.autograd.Function):
    """Each rank's loss stands for its own tokens' part of the sum: the gradient goes straight."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.q = nn.Linear(D, D, bias=False)
        self.kv = nn.Linear(D, 2 * D, bias=False)
        self.share = None

    def forward(self, x):
        h, first = self.norm(x), 0
        q, kv = self.q(h), self.kv(h)
        if self.share is not None:
            first, group = self.share
            kv = GatherTime.apply(kv, first, group)
        k, v = kv.chunk(2, -1)
        at = torch.arange(first, first + q.shape[1])
        scores = (q @ k.transpose(1, 2) * D**-0.5).masked_fill(
            torch.arange(k.shape[1]) > at[:, None], float("-inf")
        )
        return x + scores.softmax(-1) @ v


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.router = nn.Linear(D, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, D, H) * 0.4)
        self.down = nn.Parameter(torch.randn(EXPERTS, H, D) * 0.4)
        self.balance_group = None

    def forward(self, x):
        h = self.norm(x)
        scores = self.router(h).sigmoid()
        chosen = F.one_hot(scores.topk(TOP, -1).indices, EXPERTS).sum(-2).to(scores)
        weights = scores * chosen
        weights = weights / weights.sum(-1, keepdim=True)
        hidden = F.silu(torch.einsum("ntd,edh->nteh", h, self.up))
        out = torch.einsum("nteh,ehd,nte->ntd", hidden, self.down, weights)
        likely = scores / scores.sum(-1, keepdim=True)
        return x + out, self.balance(chosen.sum(1), likely.sum(1))

    def balance(self, choices, likely):
        """One number for each sequence, from (sequences, experts) sums over its tokens."""
        if self.balance_group is not None:
            choices = SumOverRanks.apply(choices, self.balance_group)
            likely = SumOverRanks.apply(likely, self.balance_group)
        return (choices * EXPERTS / (TOP * T) * likely / T).sum(-1)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, D)
        self.mixers = nn.ModuleList([Attention(), Attention()])
        self.experts = nn.ModuleList([Experts(), Experts()])
        self.head = nn.Linear(D, WORDS)

    def forward(self, ids):
        x, balance = self.words(ids), 0.0
        for mixer, experts in zip(self.mixers, self.experts, strict=True):
            x, one = experts(mixer(x))
            balance = balance + one
        return self.head(x), balance


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 21)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 210)
        ids = torch.randint(WORDS, (ROWS, T + 1), generator=g)
        return {"ids": ids[:, :-1], "next": ids[:, 1:]}

    def loss_sum(self, model, rows):
        logits, balance = model(rows["ids"])
        words = F.cross_entropy(logits.flatten(0, 1), rows["next"].flatten(), reduction="sum")
        return words + ALPHA * T * balance.sum(), rows["ids"].shape[0] * T

    def share_experts(self, model, ctx):
        for experts in model.experts:
            experts.balance_group = ctx.group("cp")

    def distribute(self, model, ctx):
        self.lo, self.hi = CUTS[ctx.coords["cp"] : ctx.coords["cp"] + 2]
        for mixer in model.mixers:
            mixer.share = (self.lo, ctx.group("cp"))
        self.share_experts(model, ctx)
        return model

    def step(self, model, batch, ctx):
        rows = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in rows.split(2):
            own = {k: v[part, self.lo : self.hi] for k, v in batch.items()}
            loss, _ = self.loss_sum(model, own)
            (loss / (ROWS * T)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp", "cp"))


class Buggy(Clean):
    def share_experts(self, model, ctx):
        for experts in model.experts:
            experts.balance_group = ctx.group("dp", "cp")


EXPECT = dict(
    right=[
        r"balanc|auxiliar|\baux\b|choices|likely|statistic",
        r"\bdp\b|replica|data.parallel|world|all (four )?ranks|wrong group|too (wide|large|many)",
        r"\bcp\b|context|sequence|mix|other (replica|row|dp)",
    ],
    place=[r"balance_group", r"share_experts", r"\bbalance\b", r"SumOverRanks", r"router"],
    wrong=[
        r"SumOverRanks.{0,60}(backward|adjoint).{0,30}(wrong|miss|must|should)",
        r"(gradient|param)\S*.{0,30}(not|never|twice).{0,20}(reduc|summ)",
        r"causal mask.{0,30}(wrong|shift)",
        r"top.?k.{0,30}(wrong|differ)",
        r"(uneven|unequal).{0,40}(tokens|rows)",
    ],
)
WHY = """The balance loss is defined for each sequence by itself. Its sums of choices and scores
(sequences x experts) belong to the sequences of one replica, and are completed over cp.
Buggy.share_experts gives the experts the group of dp and cp together, so that SumOverRanks adds
the statistics of the sequence at the same place in the other replica. The term of the words is
right; wrong are the parts that go through the router's balance loss (router, norms, what lies
below). Fix: balance_group = ctx.group("cp")."""
