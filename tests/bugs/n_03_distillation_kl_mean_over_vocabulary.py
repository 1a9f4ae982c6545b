"""A DistilBERT student learns from a frozen BERT teacher at the masked tokens (hard cross entropy and soft KL with temperature); the loss
function is compiled, the student in DDP. After the many questions on kl_div's reduction="mean" (pytorch issues: "not the mathematically
correct KL"): the mean goes over the vocabulary too.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForMaskedLM, DistilBertConfig, DistilBertForMaskedLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, LENGTH, VOCABULARY, MASK = 7, 10, 33, 3
TEMPERATURE, ALPHA = 2.0, 0.3


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = DistilBertForMaskedLM(
            DistilBertConfig(
                vocab_size=VOCABULARY,
                dim=16,
                n_layers=2,
                n_heads=2,
                hidden_dim=22,
                max_position_embeddings=LENGTH,
                dropout=0.0,
                attention_dropout=0.0,
                initializer_range=0.2,
            )
        )
        self.teacher = BertForMaskedLM(
            BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=20,
                num_hidden_layers=1,
                num_attention_heads=4,
                intermediate_size=30,
                max_position_embeddings=LENGTH,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                initializer_range=0.3,
            )
        ).requires_grad_(False)

    def forward(self, input_ids, attention_mask):
        with torch.no_grad():
            teacher = self.teacher(input_ids=input_ids, attention_mask=attention_mask).logits
        return self.student(input_ids=input_ids, attention_mask=attention_mask).logits, teacher


def distillation(student, teacher, labels):
    hard = F.cross_entropy(student, labels, reduction="sum")
    soft = F.kl_div(
        F.log_softmax(student / TEMPERATURE, -1),
        F.softmax(teacher / TEMPERATURE, -1),
        reduction="sum",
    )
    return ALPHA * hard + (1 - ALPHA) * TEMPERATURE**2 * soft


def distillation_mean(student, teacher, labels):
    hard = F.cross_entropy(student, labels, reduction="sum")
    soft = F.kl_div(
        F.log_softmax(student / TEMPERATURE, -1),
        F.softmax(teacher / TEMPERATURE, -1),
        reduction="mean",
    )
    return ALPHA * hard + (1 - ALPHA) * TEMPERATURE**2 * soft * len(labels)


class Clean:
    criterion = staticmethod(distillation)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Pair()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(4, VOCABULARY, (ROWS, LENGTH), generator=g)
        lengths = torch.randint(5, LENGTH + 1, (ROWS, 1), generator=g)
        valid = torch.arange(LENGTH) < lengths
        hidden = (torch.rand(ROWS, LENGTH, generator=g) < 0.35) & valid
        hidden[:, 1] = True
        return {
            "input_ids": ids.masked_fill(hidden, MASK).masked_fill(~valid, 0),
            "attention_mask": valid.long(),
            "labels": ids.masked_fill(~hidden, -100),
        }

    def loss_sum(self, model, rows):
        student, teacher = model(rows["input_ids"], rows["attention_mask"])
        where = rows["labels"] != -100
        return distillation(student[where], teacher[where], rows["labels"][where]), where.sum()

    def distribute(self, model, ctx):
        self.compiled = torch.compile(self.criterion, backend="aot_eager", dynamic=True)
        return DistributedDataParallel(model)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        student, teacher = model(mine["input_ids"], mine["attention_mask"])
        where = mine["labels"] != -100
        loss = self.compiled(student[where], teacher[where], mine["labels"][where])
        # DDP averages
        (loss * ctx.axes["dp"] / (batch["labels"] != -100).sum()).backward()


class Buggy(Clean):
    criterion = staticmethod(distillation_mean)


EXPECT = dict(
    right=[
        r"loss|objective|criterion|logit|\bkl\b|distil|soft|teacher|vocab_projector|head|output",
        r"differ|other|wrong|not the|term|part|scal|small|mean|divid|weigh|factor|disagree|mismatch|loss function|what the loss",
    ],
    place=[
        r"student",
        r"loss|logit|criterion|objective",
        r"(every|all|each) (param|gradient|rank|weight|tensor)",
        r"vocab_projector|head",
    ],
    wrong=[
        r"(not|never) (been )?(all.?)?(reduced|summed)",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"mean of (the )?(rank |ranks' )?means",
        r"(own|local) (count|denominator|number of (valid )?tokens)",
        r"teacher\S* (gradient|grad|weights?) (is|are) (wrong|missing)",
        r"rows? (is|are|was|were) (missing|dropped|lost|counted)",
    ],
)
WHY = (
    "The soft term takes kl_div's reduction='mean', which divides by the vocabulary size (33) too; multiplied by the number of tokens only, "
    "the KL part of the loss is 33 times too small. The cross entropy, the count and the reduction are right; so the gradient entering the "
    "logits is that of another loss, on all ranks, for every token alike."
)
