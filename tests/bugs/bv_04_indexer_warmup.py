"""Dense warm-up of a sparse-attention indexer (as in DeepSeek-V3.2): a small "lightning indexer", replicated on the tensor-parallel ranks, scores all earlier tokens and learns by KL from the attention
probabilities averaged over the heads; the language model learns by cross entropy at the same time. Five heads are cut over two ranks (3 and 2), the output projection is row parallel; two data-parallel
replicas, two micro-batches.

The bug: the indexer's target is averaged over the heads of the own rank, it is not summed over the tensor-parallel group. After the DSA indexer loss of Megatron-LM and its forks under tensor parallelism
(the attention scores of the heads have to be all-reduced before they become the target).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, LENGTH, WORDS, WIDTH, HEADS, DIM, INDEX_HEADS, WEIGHT = 6, 5, 11, 8, 5, 2, 2, 0.7


class CopyToHeads(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad, None


class SumPartial(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, HEADS * DIM)
        self.k = nn.Linear(WIDTH, HEADS * DIM)
        self.v = nn.Linear(WIDTH, HEADS * DIM)
        self.o = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.index_q = nn.Linear(WIDTH, INDEX_HEADS * 3)
        self.index_k = nn.Linear(WIDTH, 3)
        self.index_w = nn.Linear(WIDTH, INDEX_HEADS)
        self.lm_head = nn.Linear(WIDTH, WORDS)

    def attend(self, x):
        """Output of the heads held here, before the sum, and their probabilities (b, h, t, s)."""
        q, k, v = (p(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) * DIM**-0.5
        t = x.shape[1]
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
        probs = scores.softmax(-1)
        return self.o((probs @ v).transpose(1, 2).flatten(2)), probs

    def index_scores(self, x):
        q = self.index_q(x).unflatten(-1, (INDEX_HEADS, -1))
        dots = torch.einsum("btjd,bsd->btjs", q, self.index_k(x)).relu()
        scores = torch.einsum("btjs,btj->bts", dots, self.index_w(x))
        t = x.shape[1]
        return scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -1e4)


def indexer_kl(scores, target):
    logq = scores.log_softmax(-1)
    return (torch.special.xlogy(target, target) - target * logq).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        model = Model()
        with torch.no_grad():
            for p in (model.q, model.k):
                p.weight.mul_(3)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def loss_sum(self, model, rows):
        e = model.embed(rows["ids"])
        x = model.norm(e)
        out, probs = model.attend(x)
        logits = model.lm_head(e + out)
        loss = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")
        kl = indexer_kl(model.index_scores(x.detach()), probs.detach().mean(1))
        return loss + WEIGHT * kl, rows["labels"].numel()

    def distribute(self, model, ctx):
        own = torch.arange(HEADS * DIM).view(HEADS, DIM)
        own = own.tensor_split(ctx.axes["tp"])[ctx.coords["tp"]].flatten()
        for p in (model.q, model.k, model.v):
            p.weight = nn.Parameter(p.weight.data[own].clone())
            p.bias = nn.Parameter(p.bias.data[own].clone())
        model.o.weight = nn.Parameter(model.o.weight.data[:, own].clone())
        return model

    def indexer_target(self, probs, ctx):
        target = probs.detach().sum(1)
        dist.all_reduce(target, group=ctx.group("tp"))
        return target / HEADS

    def micro_loss(self, model, part, ctx):
        group = ctx.group("tp")
        e = model.embed(part["ids"])
        x = model.norm(e)
        out, probs = model.attend(CopyToHeads.apply(x, group))
        logits = model.lm_head(e + SumPartial.apply(out, group))
        loss = F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction="sum")
        kl = indexer_kl(model.index_scores(x.detach()), self.indexer_target(probs, ctx))
        return loss + WEIGHT * kl

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            (self.micro_loss(model, part, ctx) / batch["labels"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def indexer_target(self, probs, ctx):
        target = probs.detach().sum(1)
        return target / target.sum(-1, keepdim=True)


EXPECT = dict(
    right=[
        r"index|target|teacher|attention (prob|distribution|score)|probs",
        r"own heads|local heads|heads (of|on|held by|in) (the|its|each|one|this) |own (rank|part|shard|share|half|slice)|its own|local|not (summed|reduced|all.?reduced|averaged|added)|(missing|lacks?|without|no|left out|omit\w*).{0,30}(all.?reduce|sum|reduc|collective|exchange)|(all.?reduce|sum|reduc|collective|exchange).{0,50}(missing|absent|lacking|left out|omitted|skipped|not (made|called|there|done|issued))|partial|(2|3|part|some|subset) of (the |all )?(5 |five )?heads|only (its|the) heads",
    ],
    place=[
        r"indexer_target",
        r"index(er)?_?(kl|scores|q|k|w)?\b",
        r"\bprobs\b|\btarget\b",
        r"micro_loss",
    ],
    wrong=[
        r"over the (wrong|data|dp) (group|axis)|wrong group",
        r"index_[qkw].{0,60}gradient.{0,30}(not|never) (reduced|summed) over (the )?(tp|tensor)",
        r"micro.?batch(es)? .{0,30}(lost|dropped|overwritten)|reduced (twice|again)|counted (twice|two times)",
        r"CopyToHeads.{0,60}(wrong|missing)|mean of means|own token count",
    ],
)
WHY = (
    "The target of the indexer is the mean of the attention probabilities of all five heads; indexer_target takes those of the rank's own heads (three on tp 0, two on tp 1) and makes a distribution of them, the "
    "all-reduce over tp is not there. So index_q, index_k and index_w learn from different targets: their gradients are wrong on all ranks and differ between the tensor-parallel ranks, in both micro-batches; "
    "the rest of the model (target and indexer input are detached) is right. A right cause names the indexer's target made of the own heads, or its missing sum over tp. Fix: all-reduce probs.sum(1) over tp, divide by HEADS."
)
