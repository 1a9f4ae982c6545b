"""Distillation under FSDP2: cross entropy plus KL to a teacher at temperature T, times T squared.
After reports on distillation trainers: the cached teacher logits are not divided by T."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, WIDTH, CLASSES, T, ALPHA = 11, 9, 7, 3.0, 0.4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 13)
        self.fc2 = nn.Linear(13, WIDTH)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.classifier = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.classifier(self.norm(self.blocks(self.stem(x))))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"hard": self.hard, "distill": self.distill}

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, 6, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
            "teacher": 2 * torch.randn(ROWS, CLASSES, generator=g),
        }

    @staticmethod
    def hard_of(logits, rows):
        return (1 - ALPHA) * F.cross_entropy(logits, rows["y"], reduction="sum")

    @staticmethod
    def distill_of(logits, teacher):
        """teacher: its logits over T."""
        student = (logits / T).log_softmax(-1)
        kl = F.kl_div(student, teacher.log_softmax(-1), log_target=True, reduction="sum")
        return ALPHA * T**2 * kl

    def hard(self, model, rows):
        return self.hard_of(model(rows["x"]), rows), len(rows["x"])

    def distill(self, model, rows):
        return self.distill_of(model(rows["x"]), rows["teacher"] / T), len(rows["x"])

    def loss_sum(self, model, rows):
        return self.hard(model, rows)[0] + self.distill(model, rows)[0], len(rows["x"])

    def distribute(self, model, ctx):
        for module in (*model.blocks, model):
            fully_shard(module, mesh=ctx.mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return model

    def cached_teacher(self, rows):
        return rows["teacher"] / T

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        logits = model(mine["x"])
        loss = self.hard_of(logits, mine) + self.distill_of(logits, self.cached_teacher(mine))
        (loss / ROWS).backward()


class Buggy(Clean):
    def cached_teacher(self, rows):
        return rows["teacher"]


EXPECT = dict(
    right=[
        r"distill|loss|classifier",
        r"distill|loss (itself|differs|value|function|is (wrong|another|computed)|term)"
        r"|(outside|after|behind|above) (the |every )?(last )?(model|module|classifier)|enters"
        r"|arrives"
        r"|(into|at|of) (the )?(output|logits|classifier)|other weights? (of|for)|weighs|weighted"
        r"|teacher",
    ],
    place=[r"distill", r"classifier", r"logits"],
    wrong=[
        r"never reduced|not reduced|missing reduction",
        r"\bforward (is )?wrong",
        r"counted (twice|3 times)",
        r"mean of (the )?means",
    ],
)
WHY = (
    "The step compares with the teacher's distribution at temperature 1 instead of T = 3: the "
    "distillation term's gradient at the logits is wrong on every rank; the forward is right."
)
