"""Distillation on the teacher's top classes with teacher's and student's vocabulary cut over tensor ranks. After reports on top-k
distillation with tensor parallelism (verl, NeMo-RL, Megatron-LM / ModelOpt) and FAULTS C19 (what is meant globally is done in the shard):
every rank takes the top classes of its own part of the vocabulary.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 3}}}}
ROWS, LENGTH, WORDS, WIDTH, TOP = 5, 4, 15, 8, 4


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn = nn.Embedding(WORDS, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 11),
            nn.Linear(11, WIDTH),
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def trunk(self, words):
        x, _ = self.rnn(self.words(words))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Student()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "words": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
            "teacher": 1.5 * torch.randn(ROWS, LENGTH, WORDS, generator=g),
            "real": torch.arange(LENGTH) < lengths,
        }

    @staticmethod
    def distil(student, teacher, least, real, total):
        """Cross entropy with the teacher's classes of at least `least`, renormalised; `total` sums over the vocabulary."""
        target = teacher.exp() * (teacher >= least)
        target = target / total(target.sum(-1))[..., None]
        each = total(student.exp().sum(-1)).log() - total((target * student).sum(-1))
        return (each * real).sum()

    def loss_sum(self, model, rows):
        least = rows["teacher"].topk(TOP).values[..., -1:]
        logits = model.head(model.trunk(rows["words"]))
        return self.distil(logits, rows["teacher"], least, rows["real"], lambda x: x), rows[
            "real"
        ].sum()

    def distribute(self, model, ctx):
        self.own = torch.arange(WORDS).tensor_split(ctx.axes["tp"])[ctx.coords["tp"]]
        for name in ("weight", "bias"):
            setattr(
                model.head, name, nn.Parameter(getattr(model.head, name).detach()[self.own].clone())
            )
        return model

    def candidates(self, top, group):
        parts = [torch.empty_like(top) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, top.contiguous(), group=group)
        return torch.cat(parts, -1)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        group, teacher = ctx.group("tp"), mine["teacher"][..., self.own]
        least = self.candidates(teacher.topk(TOP).values, group).topk(TOP).values[..., -1:]
        logits = model.head(Copy.apply(model.trunk(mine["words"]), group))
        loss = self.distil(logits, teacher, least, mine["real"], lambda x: Sum.apply(x, group))
        (loss / batch["real"].sum()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def candidates(self, top, group):
        return top


EXPECT = dict(
    right=[
        r"loss|target|teacher|head|logits?|backward|incoming|enter",
        r"loss|target|teacher|gradient (of|at|into|entering|that)|incoming|statistic|coupl|global|local|own|shard|differ|vocab|class|top",
    ],
    place=[r"head", r"loss", r"\btp\b", r"(all|every|each) (ranks?|param)"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"(output|activation)s? of (the )?(words|rnn|norm|up|down|head)\S* .{0,20}(is|was|are) wrong|first wrong .{0,20}(words|"
        r"rnn|norm|up|down)",
        r"(wrong|other|bad|own) (divisor|denominator)",
        r"(rows?|micro-?batch(es)?) \S* ?(is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "Each tensor rank keeps the four largest teacher classes of its own five, so the target spreads over twelve classes instead of "
    "the four largest of all fifteen (renormalised rightly over the ranks). The logits are right, the loss and the gradient of the "
    "logits are wrong, and so are the gradients of all parameters, on all ranks."
)
