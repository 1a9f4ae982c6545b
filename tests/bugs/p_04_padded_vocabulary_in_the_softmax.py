"""A tied vocabulary-parallel embedding and head, cut in 6, 6 and 5 of 17 words; the logits are padded to equal widths for the all-gather, and
every rank computes the whole cross entropy. After reports on padded vocabularies (Megatron's make_vocab_size_divisible_by, NeMo): the
padded columns stay in the softmax.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH, MICRO = 7, 6, 17, 11, 3


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Gather(torch.autograd.Function):
    """Along the last dimension; every rank goes on with the same loss, so the gradient is cut."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.rest = dist.get_rank(group), x.shape[-1]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        me, width = ctx.rest
        return grad[..., me * width : (me + 1) * width].contiguous(), None


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.4)
        self.group, self.first, self.padded = None, 0, VOCAB

    def forward(self, ids):
        if self.group is None:
            return F.embedding(ids, self.weight)
        at = ids - self.first
        inside = (at >= 0) & (at < len(self.weight))
        x = F.embedding(at.where(inside, 0), self.weight) * inside[..., None]
        return Sum.apply(x, self.group)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = Words()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids):
        x = self.words(ids)
        return self.norm(x + self.rnn(x)[0])


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return LM()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"]) @ model.words.weight.T
        loss = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")
        return loss, rows["labels"].numel()

    def distribute(self, model, ctx):
        words, n, me = model.words, ctx.axes["tp"], ctx.coords["tp"]
        parts = words.weight.detach().tensor_split(n)
        words.group = ctx.group("tp")
        words.first, words.padded = sum(len(p) for p in parts[:me]), len(parts[0])
        words.weight = nn.Parameter(parts[me].clone())
        return model

    def logits(self, model, x):
        words = model.words
        own = Copy.apply(x, words.group) @ words.weight.T
        own = F.pad(own, (0, words.padded - own.shape[-1]))
        return Gather.apply(own, words.group)[..., :VOCAB]

    def step(self, model, batch, ctx):
        for rows in torch.arange(ROWS).tensor_split(MICRO):
            logits = self.logits(model, model(batch["ids"][rows]))
            labels = batch["labels"][rows].flatten()
            loss = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
            (loss / batch["labels"].numel()).backward()


class Buggy(Clean):
    def logits(self, model, x):
        words = model.words
        own = Copy.apply(x, words.group) @ words.weight.T
        own = F.pad(own, (0, words.padded - own.shape[-1]))
        return Gather.apply(own, words.group)


EXPECT = dict(
    right=[
        r"loss|logit|softmax|class|target|cross.?entropy|words",
        r"loss|gradient that reaches|another gradient|softmax|other|differ|wrong|enters",
    ],
    place=[r"loss|norm|words|logit|after the last module|(all|every|each) (rank|param)"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"forward .{0,40}(goes|is) wrong in (words|rnn|norm)",
        r"(own|local) (count|denominator|divisor)|mean of (the )?means",
        r"targets? (is|are) (shifted|masked|of other)",
    ],
)
WHY = (
    "The last rank holds 5 of 17 words and pads its logits with one column of zeros; Buggy does not cut the gathered logits to 17, so the softmax has "
    "an 18th class with logit 0. Every token's loss is too large and the other classes' probabilities are too small by a factor that differs by token, on "
    "all ranks alike. The modules' forward is right; the gradient of the loss at the output of `norm` and the head's use of words.weight are wrong, and so "
    "all parameters. The targets, the divisor and the reductions are right."
)
