"""Distillation of a language model with vocabulary-parallel heads of student and teacher (19 words as 10 and 9), two-way tensor in two-way data
parallelism: the cross entropy to the teacher's distribution beside that to the next token. After reports on knowledge distillation under tensor
parallelism: the teacher's softmax is taken over the own part of the vocabulary.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, LENGTH, VOCAB, WIDTH = 7, 5, 19, 10
TEMPERATURE, HARD = 1.7, 0.35


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


class LM(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.group = None
        self.embed = nn.Embedding(VOCAB, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        x = self.norm(x + self.rnn(x)[0])
        return self.head(x if self.group is None else Copy.apply(x, self.group))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = LM(WIDTH), LM(WIDTH + 4)
        with torch.no_grad():
            self.teacher.head.weight.mul_(3)
        self.teacher.requires_grad_(False)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Pair()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss_sum(self, model, rows):
        student = model.student(rows["ids"]).flatten(0, 1)
        soft = (model.teacher(rows["ids"]).flatten(0, 1) / TEMPERATURE).softmax(-1)
        hard = F.one_hot(rows["labels"].flatten(), VOCAB)
        loss = -(soft * (student / TEMPERATURE).log_softmax(-1)).sum() * TEMPERATURE**2
        loss = (1 - HARD) * loss - HARD * (hard * student.log_softmax(-1)).sum()
        return loss, rows["labels"].numel()

    def distribute(self, model, ctx):
        n, me = ctx.axes["tp"], ctx.coords["tp"]
        for lm in (model.student, model.teacher):
            lm.group = ctx.group("tp")
            for name in ("weight", "bias"):
                p = getattr(lm.head, name)
                own = p.detach().tensor_split(n)[me].clone()
                setattr(lm.head, name, nn.Parameter(own, requires_grad=p.requires_grad))
        return model

    def log_sum(self, logits, group):
        """The logsumexp over the whole vocabulary."""
        top = logits.detach().amax(-1, keepdim=True)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        return Sum.apply((logits - top).exp().sum(-1, keepdim=True), group).log() + top

    def soft(self, logits, group):
        return (logits - self.log_sum(logits, group)).exp()

    def cross(self, targets, logits, group):
        return self.log_sum(logits, group).sum() - Sum.apply((targets * logits).sum(), group)

    def step(self, model, batch, ctx):
        group, tp = ctx.group("tp"), ctx.coords["tp"]
        words = torch.arange(VOCAB).tensor_split(ctx.axes["tp"])[tp]
        rows = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for at in rows.tensor_split(2):
            student = model.student(batch["ids"][at]).flatten(0, 1)
            with torch.no_grad():
                soft = self.soft(model.teacher(batch["ids"][at]).flatten(0, 1) / TEMPERATURE, group)
            hard = (batch["labels"][at].flatten()[:, None] == words).to(student.dtype)
            loss = (1 - HARD) * TEMPERATURE**2 * self.cross(soft, student / TEMPERATURE, group)
            loss = loss + HARD * self.cross(hard, student, group)
            (loss / batch["labels"].numel()).backward()
        for p in model.student.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def soft(self, logits, group):
        return logits.softmax(-1)


EXPECT = dict(
    right=[
        r"loss|target|teacher|student\.head|softmax|logit|gradient that reaches",
        r"loss|target|another gradient|gradient that reaches|differ|wrong|weight|term|teacher",
    ],
    place=[r"loss|student\.head|teacher|after the last module|(all|every|each) (rank|param)"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"forward .{0,40}(goes|is) wrong in|activations? .{0,20}wrong",
        r"(own|local) (count|denominator|divisor) of (tokens|rows)|mean of (the )?means",
        r"teacher\S* (gets|has|receives) a gradient",
    ],
)
WHY = (
    "The teacher's probabilities are a softmax over the own 10 or 9 words on each tensor rank: over the vocabulary they add up to 2 and not to 1, and each word's is too large "
    "by a factor of its token and rank. The gradient of the soft term at the student's logits is softmax minus these targets, so it is wrong at every token; the term "
    "of the next token is right. Forward of student and teacher, the divisor and the reductions over dp and tp are right; all student parameters are wrong."
)
