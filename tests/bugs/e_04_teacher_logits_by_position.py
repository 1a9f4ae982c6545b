"""Distillation of a CNN from logits that a teacher stored in data-set order. After modelscope/easydistill issue 21 and
haitongli/knowledge-distillation-pytorch issue 4: the store is read by position in the loader, not by sample index.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"student": {"axes": {"dp": 5}}}}
ROWS, SIDE, CLASSES, TEMPERATURE, SOFT, MICRO_BATCHES = 17, 6, 6, 2.0, 0.8, 2


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 5, 3, padding=1)
        self.depthwise = nn.Conv2d(5, 5, 3, groups=5, stride=2)
        self.pointwise = nn.Conv2d(5, 9, 1)
        self.norm, self.head = nn.LayerNorm(9), nn.Linear(9, CLASSES)

    def forward(self, x):
        x = F.relu(self.pointwise(self.depthwise(F.relu(self.stem(x)))))
        return self.head(self.norm(x.flatten(2).mean(-1)))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"hard": self.hard_sum, "soft": self.soft_sum}

    def build(self):
        torch.manual_seed(self.seed)
        return Student()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, 2, SIDE, SIDE, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
            "teacher": 2 * torch.randn(ROWS, CLASSES, generator=g),
        }

    @staticmethod
    def hard(logits, y):
        return F.cross_entropy(logits, y, reduction="sum")

    @staticmethod
    def soft(logits, teacher):
        kl = F.kl_div(
            (logits / TEMPERATURE).log_softmax(-1),
            (teacher / TEMPERATURE).softmax(-1),
            reduction="sum",
        )
        return SOFT * TEMPERATURE**2 * kl

    def hard_sum(self, model, rows):
        return self.hard(model(rows["x"]), rows["y"]), len(rows["x"])

    def soft_sum(self, model, rows):
        return self.soft(model(rows["x"]), rows["teacher"]), len(rows["x"])

    def loss_sum(self, model, rows):
        logits = model(rows["x"])
        return self.hard(logits, rows["y"]) + self.soft(logits, rows["teacher"]), len(rows["x"])

    def stored(self, store, samples, start):
        """What the teacher said of these samples; the loader has handed out `start` samples so far."""
        return store[samples]

    def step(self, model, batch, ctx):
        store = batch["teacher"]
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(5))
        samples = order[ctx.rank :: ctx.world_size]
        start = 0
        for part in samples.tensor_split(MICRO_BATCHES):
            logits = model(batch["x"][part])
            loss = self.hard(logits, batch["y"][part])
            loss = loss + self.soft(logits, self.stored(store, part, start))
            (loss / ROWS).backward()
            start += len(part)
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def stored(self, store, samples, start):
        return store[start : start + len(samples)]


EXPECT = dict(
    right=[
        r"soft|distil|teacher|\bkl\b",
        r"(other|wrong|different|foreign|another|first|mis\w*|shuffl\w*|not its own).{0,40}(row|sample|target|logit|teacher|index|position"
        r"|entr|label|order)|(row|sample|target|logit|teacher|index|order|label)\w*.{0,40}(other|wrong|different|mismatch|misalign|shuffl"
        r"|permut|swap|mixed)|misalign|mismatch|permut",
    ],
    place=[r"soft|teacher|\bkl\b|distil", r"rows?|samples?", r"target"],
    wrong=[
        r"hard\S* (term )?(is|has|gets) (wrong|divided|scaled)",
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"(reduced|counted|divided) (twice|again)",
        r"rows? (is|are|was|were) (lost|missing|dropped|duplicated|repeated)",
        r"temperature (is|was) (wrong|missing|not)",
    ],
)
WHY = (
    "Every rank reads the teacher's store at 0, 1, 2, ... of its own loader instead of at the shuffled sample indices: the soft term "
    "pairs the student's logits with other samples' teacher logits on all ranks; the hard term is right."
)
