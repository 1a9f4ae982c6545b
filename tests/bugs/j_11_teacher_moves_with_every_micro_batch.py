"""A mean teacher: cross-entropy on labelled rows, consistency with the averaged weights on all. After open_clip's and diffusers' reports of
EMA updates inside the accumulation window ("EMA is updated every micro step") and FAULTS C12-13: the teacher moves with every
micro-batch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

TOPOLOGY = {"pools": {"vision": {"axes": {"dp": 2}}}}
ROWS, INPUTS, WIDTH, CLASSES = 16, 6, 9, 5
MICRO_BATCHES, DECAY, WEIGHT = 4, 0.6, 2.0


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(INPUTS, WIDTH), nn.LayerNorm(WIDTH)
        self.second, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = F.silu(self.norm(self.first(x)))
        return self.out(x + F.silu(self.second(x)))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = Student(), Student().requires_grad_(False)
        with torch.no_grad():
            for param in self.teacher.parameters():
                param.mul_(2)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "labelled": lambda m, r: (self.sums(m, self.start(m), r)[0], (r["y"] != -100).sum()),
            "consistency": lambda m, r: (self.sums(m, self.start(m), r)[1], len(r["y"])),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return Pair()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        x = torch.randn(ROWS, INPUTS, generator=g)
        hidden = torch.rand(ROWS, generator=g) < 0.4
        hidden[::5] = False
        return {
            "weak": x + 0.1 * torch.randn(ROWS, INPUTS, generator=g),
            "strong": x + 0.5 * torch.randn(ROWS, INPUTS, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g).masked_fill(hidden, -100),
        }

    @staticmethod
    def moved(model, weights):
        """The teacher's weights, a step nearer to the student's."""
        student = dict(model.student.named_parameters())
        return {k: v.lerp(student[k].detach(), 1 - DECAY) for k, v in weights.items()}

    def start(self, model):
        return self.moved(model, dict(model.teacher.named_parameters()))

    @staticmethod
    def sums(model, weights, rows):
        logits = model.student(rows["strong"])
        target = functional_call(model.teacher, weights, rows["weak"]).detach().softmax(-1)
        wrong = (logits.softmax(-1) - target).square().sum()
        return F.cross_entropy(logits, rows["y"], reduction="sum"), WEIGHT * wrong

    def loss_sum(self, model, rows):
        labelled, consistency = self.sums(model, self.start(model), rows)
        n = len(rows["y"])
        return n * labelled / (rows["y"] != -100).sum().clamp(min=1) + consistency, n

    def next_weights(self, model, weights):
        return weights

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        labels = (mine["y"] != -100).sum()
        dist.all_reduce(labels)
        weights = self.start(model)
        for i in range(MICRO_BATCHES):
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            labelled, consistency = self.sums(model, weights, micro)
            (labelled / labels + consistency / ROWS).backward()
            weights = self.next_weights(model, weights)
        for param in model.student.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def next_weights(self, model, weights):
        return self.moved(model, weights)


EXPECT = dict(
    right=[
        r"consistency|teacher|forward|target",
        r"micro.?batch|later|after the first|teacher|state|target|changes|differ|consistency|moved|second",
    ],
    place=[r"teacher", r"consistency", r"micro.?batch", r"(all|every|each) ranks?"],
    wrong=[
        r"labelled (term|loss)?\S* ?(is|has) (a )?(wrong|scaled|missing)",
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"(output|forward) of (the )?student\S* (is|was) wrong",
        r"micro.?batch(es)? \S* ?(is|are|was|were) (lost|missing|dropped|left out)",
    ],
)
WHY = (
    "The averaged weights move towards the student's after every micro-batch instead of once per step, so from the second micro-batch "
    "on the teacher's outputs, the targets of the consistency term, are wrong on both ranks. The labelled term is right; all student "
    "parameters are wrong."
)
