"""Distillation under FSDP2 on three ranks with two micro-batches each (gradient sync for the last): the loss is the divergence of the student from the teacher, KL(teacher || student), over answer words, made in chunks of four
words so that not all logits are turned into probabilities at once. The teacher's logits come with the batch. The divisor is the number of answer words of all ranks; rows and answers are of unequal number and length.

The bug: the chunked loss calls F.kl_div(teacher, student, log_target=True). Its first argument is the approximating distribution, so this is KL(student || teacher), the reverse divergence. As in huggingface/trl PR 3043
(F.kl_div takes q and p to give KL(p || q); the ends of beta), the review of modelscope/twinkle PR 112 (forward and reverse KL swapped in gkd.py) and paiml/aprender PR 2153.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ANSWERS = [3, 6, 2, 5, 1, 4, 6, 2, 3, 5, 4]
PARTS = [[(0, 3), (3, 5)], [(5, 6), (6, 8)], [(8, 9), (9, 11)]]
TOKENS, VOCABULARY, WIDTH, CHUNK = 8, 11, 7, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 10), nn.GELU(), nn.Linear(10, WIDTH))

    def forward(self, x):
        h = self.norm(x).transpose(1, 2)
        x = x + self.mix(F.pad(h, (2, 0))).transpose(1, 2)
        return x + self.feed(x)


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def answer_words(rows):
    return torch.arange(TOKENS)[None] >= TOKENS - rows["answer"][:, None]


class Clean:
    swapped = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Student()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(ANSWERS)
        return {
            "ids": torch.randint(VOCABULARY, (rows, TOKENS), generator=g),
            "teacher": 1.5 * torch.randn(rows, TOKENS, VOCABULARY, generator=g),
            "answer": torch.tensor(ANSWERS),
        }

    def loss_sum(self, model, rows):
        q = model(rows["ids"]).log_softmax(-1)
        p = rows["teacher"].log_softmax(-1)
        words = (p.exp() * (p - q)).sum(-1)
        return words[answer_words(rows)].sum(), int(rows["answer"].sum())

    def distribute(self, model, ctx):
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)

    def chunked(self, model, rows):
        there = answer_words(rows)
        student, teacher = model(rows["ids"])[there], rows["teacher"][there]
        loss = student.new_zeros(())
        for s, t in zip(student.split(CHUNK), teacher.split(CHUNK)):
            s, t = s.log_softmax(-1), t.log_softmax(-1)
            pair = (t, s) if self.swapped else (s, t)
            loss = loss + F.kl_div(*pair, reduction="sum", log_target=True)
        return loss

    def step(self, model, batch, ctx):
        words = int(batch["answer"].sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            model.set_requires_gradient_sync(turn == len(parts) - 1)
            rows = {k: v[low:high] for k, v in batch.items()}
            (self.chunked(model, rows) * ctx.world_size / words).backward()


class Buggy(Clean):
    swapped = True


EXPECT = dict(
    right=[
        r"(?i)loss|kl|divergence|criterion|logits",
        r"(?i)revers|swap|argument|direction|other (loss|function|divergence)|"
        r"(loss|kl|divergence|criterion).{0,60}(wrong|differ|not the|other|another)|"
        r"(gradient|cotangent).{0,40}(logits|head|output).{0,40}(wrong|differ)|"
        r"(logits|head|output).{0,60}gradient.{0,40}(wrong|differ)|(wrong|differ\w*|"
        r"other).{0,60}(loss|logits|gradient of the output)",
    ],
    place=[r"(?i)loss|kl|logits|head|criterion"],
    wrong=[
        r"(?i)forward of .{0,20}(embed|blocks|head) .{0,20}wrong|model.{0,10}forward is wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)|"
        r"counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?3\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank \d|rank \d alone|only the last chunk",
        r"(?i)backward of .{0,20}(block|mix|feed|norm|embed|head).{0,20}wrong|temperature",
    ],
)
WHY = (
    "Embedding, blocks and head are right in the forward on all ranks and in all micro-batches: the logits are right. The loss made of them is another one, KL(student || teacher) instead of KL(teacher || student), so the "
    "gradient that comes back to the logits is wrong in direction for every answer word of every row (q (log q - log p - KL) instead of q - p), and with it the gradients of all parameters, equally for all ranks. Mask, chunks, "
    "the divisor 41, FSDP2's average (times 3) and the gradient sync are right. Fix: F.kl_div(student, teacher, log_target=True)."
)
