"""Distillation from stored teacher logits under plain DDP (which averages): cross entropy and a soft term at temperature 2, per token; unlike rows.
After the questions on F.kl_div(reduction="batchmean") with logits of shape rows x length x vocabulary.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WIDTH, VOCAB = 10, 5, 8, 12
TEMPERATURE, SOFT = 2.0, 0.4


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, 10, batch_first=True)
        self.norm, self.mlp, self.head = nn.LayerNorm(10), nn.Linear(10, 14), nn.Linear(14, VOCAB)

    def forward(self, tokens):
        h, _ = self.rnn(self.embed(tokens))
        return self.head(torch.tanh(self.mlp(self.norm(h))))


def hard_sum(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def divergence(logits, teacher, reduction):
    student = (logits / TEMPERATURE).log_softmax(-1)
    target = (teacher / TEMPERATURE).softmax(-1)
    return TEMPERATURE**2 * F.kl_div(student, target, reduction=reduction)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Student()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "tokens": torch.randint(VOCAB, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCAB, (ROWS, LENGTH), generator=g),
            "teacher": 2 * torch.randn(ROWS, LENGTH, VOCAB, generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["tokens"])
        soft = divergence(logits, rows["teacher"], "sum")
        return (1 - SOFT) * hard_sum(logits, rows["labels"]) + SOFT * soft, rows["labels"].numel()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def soft_loss(self, logits, teacher, scale):
        return divergence(logits, teacher, "sum") * scale

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        logits = model(mine["tokens"])
        scale = ctx.world_size / batch["labels"].numel()  # DDP averages
        hard = hard_sum(logits, mine["labels"]) * scale
        soft = self.soft_loss(logits, mine["teacher"], scale)
        ((1 - SOFT) * hard + SOFT * soft).backward()


class Buggy(Clean):
    def soft_loss(self, logits, teacher, scale):
        return divergence(logits, teacher, "batchmean")


EXPECT = dict(
    right=[
        r"kl|diverg|soft|distill|teacher|second term|one (term|part) of the loss|term|batchmean|other path|second path|targets?",
        r"divid|normali|denominator|mean|count|number of|factor|times|weigh|scale|coefficient",
    ],
    place=[r"loss|kl|soft|teacher|diverg|head|logits"],
    wrong=[
        r"forward (is|goes|was) wrong|goes wrong in the forward",
        r"(is|are|was|were) (never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"do(es)? not read every row once|rows? .{0,20}(never|twice) read",
        r"(counted|reduced|summed) (twice|again)",
        r"cross.?entropy (is|has|enters) .{0,30}(wrong|factor|times)",
        r"(wrong|other) temperature|temperature is (missing|applied twice)",
        r"backward of \S*(embed|rnn|norm|mlp|head)\S* is wrong",
    ],
)
WHY = (
    "The soft term is taken with reduction='batchmean', which divides by the first dimension, that is by the rank's own number of rows (4, 3, 3), and not by "
    "tokens; DDP then averages these with equal weight. The right weight of a token's KL is 1/50, here it is 1/(3*4) on rank 0 and 1/(3*3) on ranks 1 and 2: "
    "25/6 and 50/9 times too much. The cross entropy is right, so are the logits on all ranks and the reduction. Right: the sum over tokens, divided by all "
    "ranks' 50 tokens (times the world for DDP's average)."
)
