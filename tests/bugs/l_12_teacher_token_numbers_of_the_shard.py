"""Distillation on the teacher's most likely tokens, with the teacher's vocabulary cut over tensor ranks. Modelled on the top-k
distillation of verl, NeMo-Aligner and slime (merge the best k of each vocabulary shard, then take the best k of these): the token
numbers that come out of a shard are numbers within the shard.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"distill": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, LENGTH, VOCAB, WIDTH, TOP = 7, 5, 15, 8, 4


class Lm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed, self.mix = nn.Embedding(VOCAB, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def hidden(self, tokens):
        return self.mix(self.embed(tokens))[0]


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = Lm(WIDTH + 3).requires_grad_(False), Lm(WIDTH)
        self.teacher.head.weight.data.mul_(6)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Pair()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ends = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "tokens": torch.randint(VOCAB, (ROWS, LENGTH), generator=g),
            "mask": torch.arange(LENGTH) < ends,
        }

    @staticmethod
    def divergence(model, rows, values, ids):
        """The teacher's distribution over its TOP tokens against the student's over the vocabulary."""
        target = values.softmax(-1)
        student = model.student.head(model.student.hidden(rows["tokens"])).log_softmax(-1)
        each = (target * (target.log() - student.gather(-1, ids))).sum(-1)
        return (each * rows["mask"]).sum()

    def loss_sum(self, model, rows):
        with torch.no_grad():
            logits = model.teacher.head(model.teacher.hidden(rows["tokens"]))
        return self.divergence(model, rows, *logits.topk(TOP, -1)), rows["mask"].sum()

    def numbered(self, ids, first):
        return ids + first

    @torch.no_grad()
    def teacher_top(self, model, tokens, ctx):
        mine = torch.arange(VOCAB).tensor_split(ctx.axes["tp"])[ctx.coords["tp"]]
        head = model.teacher.head
        logits = F.linear(model.teacher.hidden(tokens), head.weight[mine], head.bias[mine])
        values, ids = logits.topk(TOP, -1)
        ids = self.numbered(ids, mine[0])
        gathered = []
        for t in (values, ids):
            parts = [torch.empty_like(t) for _ in range(ctx.axes["tp"])]
            dist.all_gather(parts, t.contiguous(), group=ctx.group("tp"))
            gathered.append(torch.cat(parts, -1))
        values, best = gathered[0].topk(TOP, -1)
        return values, gathered[1].gather(-1, best)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        count = mine["mask"].sum()
        dist.all_reduce(count, group=ctx.group("dp"))
        top = self.teacher_top(model, mine["tokens"], ctx)
        (self.divergence(model, mine, *top) / count).backward()
        for param in model.student.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def numbered(self, ids, first):
        return ids


EXPECT = dict(
    right=[
        r"loss|target|label|teacher|objective|gradient (at|of|entering|into|that enters|with respect to) (the )?(output|student|head|"
        r"logits|last)|output gradient",
        r"wrong|differ|other|not the|shard|vocab|index|token|offset|deviat|value",
    ],
    place=[r"student|head|output|loss|teacher", r"(all|every|each) ranks?|ranks? \W?[0-3]"],
    wrong=[
        r"(never|not) (been )?(all.?)?(reduced|summed|averaged)",
        r"(reduced|counted|summed) (twice|again|\d times)",
        r"(output|forward|activations?) of (the )?student\S* (is|are|was|were) wrong|forward pass of the student is wrong",
        r"mean of (the )?(rank |ranks' )?means",
        r"detach|lost its graph",
        r"teacher\S* (has|have|gets?) a (wrong )?gradient",
    ],
)
WHY = (
    "The teacher's best tokens of the second vocabulary shard (8 to 14) keep their numbers within the shard (0 to 6), so the student is "
    "taught other tokens. The student's forward is right; the loss and the gradients of all student parameters are wrong, on all four "
    "ranks alike."
)
