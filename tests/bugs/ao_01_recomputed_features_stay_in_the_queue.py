"""Probe on hidden features with transformers under DDP on two ranks, two micro-batches each (no_sync for the first): a BERT student of two layers with gradient checkpointing (not reentrant) and frozen embeddings, a frozen BERT teacher. A
forward hook on the attention of the student's first layer puts its output, detached, into a queue; a trained projection (a probe, which does not train the student) maps it to the teacher's features, beside the cross entropy of a
classifier on the student. Divisor: all rows.

The bug: the queue is not emptied between micro-batches. Checkpointing runs the layer again in the backward, and the hook puts a second output into the queue, so that the next micro-batch takes the recomputed features of the one before.
After pytorch/pytorch #134310 (side effects of module forward hooks in utils.checkpoint) and the questions on hooks that are called twice with activation checkpointing (#81296).
"""

import contextlib
from collections import deque

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
VOCABULARY, TOKENS, CLASSES = 17, 6, 4
PARTS = [[(0, 3), (3, 7)], [(7, 11), (11, 13)]]


def bert(width):
    return BertModel(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=2 * width,
            max_position_embeddings=TOKENS,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.3,
        ),
        add_pooling_layer=False,
    )


class Distiller(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = bert(8), bert(12).requires_grad_(False)
        self.student.embeddings.requires_grad_(False)
        self.student.gradient_checkpointing_enable({"use_reentrant": False})
        self.project, self.classify = nn.Linear(8, 12), nn.Linear(8, CLASSES)
        self.seen, self.wanted = deque(), []
        self.student.encoder.layer[0].attention.register_forward_hook(
            lambda module, args, out: self.seen.append(out[0].detach())
        )
        self.teacher.encoder.layer[0].attention.register_forward_hook(
            lambda module, args, out: self.wanted.append(out[0])
        )

    def forward(self, ids, mask):
        with torch.no_grad():
            self.teacher(input_ids=ids, attention_mask=mask)
        state = self.student(input_ids=ids, attention_mask=mask).last_hidden_state
        feature = self.seen.popleft()
        rows = len(ids)
        if len(feature) != rows:
            feature = (
                feature[:rows]
                if len(feature) > rows
                else F.pad(feature, (0, 0, 0, 0, 0, rows - len(feature)))
            )
        return self.classify(state[:, 0]), self.project(feature), self.wanted.pop()


def distill(net, rows):
    logits, mine, teachers = net(rows["ids"], rows["mask"])
    seen = rows["mask"][:, :, None].to(mine.dtype)
    return (
        F.cross_entropy(logits, rows["label"], reduction="sum")
        + 0.5 * ((mine - teachers).square() * seen).sum()
    )


class Clean:
    emptied = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Distiller().train()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        length = torch.randint(3, TOKENS + 1, (rows,), generator=g)
        return {
            "ids": torch.randint(VOCABULARY, (rows, TOKENS), generator=g),
            "mask": (torch.arange(TOKENS)[None] < length[:, None]).long(),
            "label": torch.randint(CLASSES, (rows,), generator=g),
        }

    def loss_sum(self, model, rows):
        model.seen.clear()
        return distill(model, rows), len(rows["ids"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        model.train()
        queue = model.module.seen
        queue.clear()
        count, parts = len(batch["ids"]), PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (distill(model, rows) * ctx.world_size / count).backward()
            if self.emptied:
                queue.clear()


class Buggy(Clean):
    emptied = False


EXPECT = dict(
    right=[
        r"(?i)feature|hook|queue|project|distill|attention|recomput|checkpoint|input",
        r"(?i)previous|earlier|before|stale|foreign|other (rows|micro.?batch)|left.?over|recomput|wrong (rows|input)|not (of )?(its|the) own|(rows|micro.?batch).{0,40}(another|other)|input.{0,30}(wrong|differ|other)",
        r"(?i)micro.?batch|row|queue|call|second|later|project",
    ],
    place=[r"(?i)project|hook|queue|feature|layer\.0\.attention"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|wrong divisor|mean of means",
        r"(?i)no_sync.{0,40}(wrong|missing|too (early|late))|divi(ded|des) by (its|their) own",
        r"(?i)dropout|random|labels? .{0,20}(is|are) (wrong|of other)",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)the forward is right|wrong only in the backward",
        r"(?i)classify.{0,30}(is|are) wrong",
        r"(?i)recomput\w+ (is|with|under|gives) (wrong|other|different)",
    ],
)
WHY = (
    "Both ranks. Micro-batch 0 (rows 0-2 on rank 0, 7-10 on rank 1) is right. Its backward recomputes layer 0 of the student and the hook appends the recomputed attention output. In micro-batch 1 (rows 3-6, rows 11-12) `popleft` "
    "gives these features of micro-batch 0 instead of the own, cut or padded with zeros to its number of rows, and they are compared with the teacher's features of the own rows. The teacher's features, the classifier's path, "
    "labels, divisor 13, no_sync and DDP's reduction are right. So the gradients of `project` are wrong, on all ranks equally, through micro-batch 1 of both; those of the student and of classify are right. The forward goes wrong "
    "first at the input of `project`. Fix: empty the queue after each backward (or record only outside of the recomputation)."
)
