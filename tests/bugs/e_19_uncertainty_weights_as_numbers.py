"""Depth, segmentation and normals with learned uncertainty weights (Kendall). After ifzhang/FairMOT issues 249 and 338 and
autonomousvision/transfuser PR 335 (log-variances as weights of the terms): the weights are turned into numbers for the log, and the
numbers go into the loss.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"vision": {"axes": {"dp": 3}}}}
ROWS, SIDE, CLASSES = 10, 5, 4
TASKS = "depth", "classes", "normals"


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6)
        self.body = nn.Conv2d(6, 6, 3, padding=2, dilation=2)
        widths = {"depth": 1, "classes": CLASSES, "normals": 3}
        self.heads = nn.ModuleDict({t: nn.Conv2d(6, widths[t], 1) for t in TASKS})
        starts = {"depth": 0.3, "classes": -0.4, "normals": 0.1}
        self.log_vars = nn.ParameterDict({t: nn.Parameter(torch.tensor(starts[t])) for t in TASKS})

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        x = x + F.relu(self.body(x))
        return {t: head(x) for t, head in self.heads.items()}


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {t: lambda m, r, t=t: self.term(m, r, t) for t in TASKS}
        self.terms["log_vars"] = lambda m, r: (0.5 * sum(m.log_vars.values()), 1)

    def build(self):
        torch.manual_seed(self.seed)
        return Dense()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        shape = ROWS, SIDE, SIDE
        return {
            "x": torch.randn(ROWS, 3, SIDE, SIDE, generator=g),
            "depth": torch.rand(*shape, generator=g),
            "measured": torch.rand(*shape, generator=g) < 0.6,
            "classes": torch.randint(CLASSES, shape, generator=g),
            "normals": F.normalize(torch.randn(ROWS, 3, SIDE, SIDE, generator=g), dim=1),
        }

    @staticmethod
    def task_sums(out, rows):
        seen = rows["measured"]
        wrong_by = (out["depth"][:, 0] - rows["depth"]).abs()
        cosine = F.cosine_similarity(out["normals"], rows["normals"], dim=1)
        return {
            "depth": ((wrong_by * seen).sum(), seen.sum()),
            "classes": (
                F.cross_entropy(out["classes"], rows["classes"], reduction="sum"),
                rows["classes"].numel(),
            ),
            "normals": ((1 - cosine).sum(), rows["classes"].numel()),
        }

    def term(self, model, rows, task):
        value, count = self.task_sums(model(rows["x"]), rows)[task]
        return (-model.log_vars[task]).exp() * value, count

    def loss_sum(self, model, rows):
        sums, n = self.task_sums(model(rows["x"]), rows), len(rows["x"])
        weights = {t: (-model.log_vars[t]).exp() for t in TASKS}
        loss = sum(weights[t] * v / c for t, (v, c) in sums.items())
        return n * (loss + 0.5 * sum(model.log_vars.values())), n

    def weights(self, model):
        weights = {t: torch.exp(-s) for t, s in model.log_vars.items()}
        self.logged = {t: w.item() for t, w in weights.items()}
        return weights

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        sums = self.task_sums(model(mine["x"]), mine)
        weights, loss = self.weights(model), 0.0
        for task, (value, count) in sums.items():
            count = torch.as_tensor(count)
            dist.all_reduce(count)
            loss = loss + weights[task] * value / count
        (loss + 0.5 * sum(model.log_vars.values()) / ctx.world_size).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def weights(self, model):
        self.logged = {t: torch.exp(-s).item() for t, s in model.log_vars.items()}
        return self.logged


EXPECT = dict(
    right=[
        r"log_var|uncertaint|weight of the term|loss weight",
        r"detach|lost|lose|no gradient|missing|misses|zero|without|lacks?|\.item|number|graph|only|drop|not reach|never reach|not flow|no part|left out|"
        r"absent|constant|disconnect|\b0\b",
    ],
    place=[r"log_var|uncertaint", r"depth|classes|normals|term"],
    wrong=[
        r"(stem|body|heads|norm)\.\S+ (is|are|has|have) (a )?wrong",
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"(reduced|counted|divided) (twice|again)",
        r"mean of (the )?means",
        r"forward (pass )?(is|was) wrong",
    ],
)
WHY = (
    "exp(-log_var) enters the loss as a Python number, so the task terms give log_vars.* no gradient: each has only the 0.5 of the "
    "regularising term, on all ranks. Trunk and heads are right, and so is the loss."
)
