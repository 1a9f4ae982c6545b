"""Self-distillation with a student, a frozen teacher and centring (DINO) under DDP; the rows do not divide by the ranks. After
facebookresearch/dino's `update_center`, which divides the reduced sum by len(teacher_output) * world_size (right for even batches
alone), and FAULTS class C18 (batch-coupled statistics).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, PIXELS, WIDTH, PROTOTYPES = 10, 9, 8, 7


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.norm = nn.Linear(PIXELS, WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 11), nn.GELU(), nn.Linear(11, WIDTH))
        self.prototypes = nn.Linear(WIDTH, PROTOTYPES)

    def forward(self, x):
        x = self.patch(x)
        return self.prototypes(x + self.mlp(self.norm(x)))


class Dino(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = Backbone(), Backbone()
        self.teacher.requires_grad_(False)

    def forward(self, first, second):
        return [(self.student(x), self.teacher(x)) for x in (first, second)]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Dino()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        x = torch.randn(ROWS, PIXELS, generator=g)
        return {
            "first": x + 0.3 * torch.randn(ROWS, PIXELS, generator=g),
            "second": x + 0.3 * torch.randn(ROWS, PIXELS, generator=g),
        }

    @staticmethod
    def match(views, center):
        (s1, t1), (s2, t2) = views
        return sum(
            F.cross_entropy(s / 0.4, ((t - center) / 0.15).softmax(-1), reduction="sum")
            for s, t in ((s1, t2), (s2, t1))
        )

    def loss_sum(self, model, rows):
        views = model(rows["first"], rows["second"])
        center = torch.cat([t for _, t in views]).mean(0)
        return self.match(views, center), len(rows["first"])

    def center(self, teacher_output, ctx):
        total = torch.cat([teacher_output.sum(0), teacher_output.new_tensor([len(teacher_output)])])
        dist.all_reduce(total)
        return total[:-1] / total[-1]

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        views = model(mine["first"], mine["second"])
        center = self.center(torch.cat([t for _, t in views]), ctx)
        (self.match(views, center) * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    def center(self, teacher_output, ctx):
        total = teacher_output.sum(0)
        dist.all_reduce(total)
        return total / (len(teacher_output) * ctx.world_size)


EXPECT = dict(
    right=[
        r"cent(er|re|ring)|teacher|statistic|batch|target|loss|coupled",
        r"uneven|unequal|own rows|local|number of rows|rank'?s own|divi\w+|differ\w*|values?|statistic|mean|count",
    ],
    place=[
        r"cent(er|re)",
        r"teacher",
        r"student",
        r"(all|every|each) ranks?|ranks? \W?[012]",
        r"loss",
    ],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"gradient .{0,30}(teacher|center) .{0,20}(missing|detached|lost)",
        r"(output|forward) of (student|teacher)\S* (is|was|are) wrong",
        r"loss .{0,20}(divided|normali[sz]ed) by (its|the|their) own (row|count)",
    ],
)
WHY = (
    "The sum of the teacher's outputs over all ranks is divided by 3 times the rank's own rows: 24 on rank 0 and 18 on ranks 1 and 2 "
    "instead of 20, so each rank subtracts another, wrong centre from the teacher's logits. All gradients of student.* are wrong "
    "(equally on all ranks, DDP averages them); the outputs of student and teacher and the normalisation of the loss are right."
)
