"""A pipeline of three stages with torch.distributed.pipelining (GPipe schedule, four micro-batches of two rows): embedding, an attention block over padded rows, and a pooled classifier. The valid lengths do not travel between the stages:
every
stage that needs them has the whole batch. The gradients of all stages are put together on all ranks at the end.

The bug: the attention stage keeps the lengths of the batch, split like the batch, and takes the next split at every call of its forward. The schedule, given no example arguments, runs the forward once with the first micro-batch to find
shapes, so
micro-batch k gets the lengths of micro-batch k + 1. After pytorch/torchtitan issue 1723 (masks made before the pipeline splits the batch are used for the wrong micro-batches) and its work-arounds.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, MICRO, TOKENS, VOCABULARY, WIDTH, CLASSES = 8, 4, 6, 9, 6, 5
LENGTHS = [6, 2, 4, 5, 1, 3, 6, 4]


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids):
        x = self.embed(ids)
        return x + torch.tanh(self.mix(x))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kept, self.call = None, 0

    def forward(self, x, lengths=None):
        if lengths is None:
            lengths = self.kept[self.call % len(self.kept)]
            self.call += 1
        there = torch.arange(x.shape[1])[None] < lengths[:, None]
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=there[:, None]))


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x, lengths):
        there = (torch.arange(x.shape[1])[None] < lengths[:, None]).to(x.dtype)[..., None]
        return self.head((self.norm(x) * there).sum(1) / there.sum(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([First(), Attention(), Last()])

    def forward(self, ids, lengths):
        first, attention, last = self.stages
        return last(attention(first(ids), lengths), lengths)


class Clean:
    by_call = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
            "lengths": torch.tensor(LENGTHS),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], rows["lengths"])
        return F.cross_entropy(logits, rows["label"], reduction="sum"), len(rows["label"])

    def step(self, model, batch, ctx):
        group, rank = ctx.group("pp"), ctx.rank
        stage = PipelineStage(model.stages[rank], rank, 3, torch.device("cpu"), group=group)
        schedule = ScheduleGPipe(
            stage,
            MICRO,
            loss_fn=lambda out, y: F.cross_entropy(out, y, reduction="sum") / ROWS,
            scale_grads=False,
        )
        if rank == 0:
            schedule.step(batch["ids"])
        elif rank == 1 and self.by_call:
            model.stages[1].kept, model.stages[1].call = batch["lengths"].chunk(MICRO), 0
            schedule.step()
        elif rank == 1:
            schedule.step(lengths=batch["lengths"])
        else:
            schedule.step(target=batch["label"], lengths=batch["lengths"])
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    by_call = True


EXPECT = dict(
    right=[
        r"(?i)stages?\.1|attention|stage 1|second stage|qkv|rank 1\b",
        r"(?i)forward|output|input|mask|length|activation",
        r"(?i)micro.?batch|other|another|foreign|next|shift|wrong|differ"
        r"|not (the )?(own|right)|row",
    ],
    place=[r"(?i)stages?\.1|attention|stage 1|second stage"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward is right|wrong only in the backward",
        r"(?i)labels? .{0,20}(is|are) (wrong|of)|targets? .{0,20}(is|are) (wrong|of)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)"
        r"|only the last micro.?batch",
        r"(?i)stages?\.0[\w.]* .{0,20}(forward|output).{0,15}wrong",
        r"(?i)(activations?|gradients?) .{0,30}(received|sent) .{0,30}(wrong|another) micro.?batch",
    ],
)
WHY = (
    "Only the forward of the attention stage (rank 1, stages.1) goes wrong: its mask is made of the lengths of the next micro-batch: rows 0-1 (lengths 6, 2) use 4, 5; rows 2-3 (4, 5) use 1, 3; rows 4-5 (1, 3) use 6, 4; rows 6-7 (6, 4) "
    "use 6, 2 "
    "(the numbering wraps around). Its input from stage 0 is right; the call that the schedule makes to infer shapes has taken the first split. From there on everything that depends on the attention's output is wrong: the logits, so "
    "the gradients of "
    "all parameters of all stages (same on all ranks after the sum). The last stage's own lengths and labels, the divisor 8, the order of micro-batches in the schedule, the transport and the final sum are right. Fix: give the lengths "
    "as a keyword "
    "to schedule.step, which splits them with the batch (or give the stage example arguments, or count by micro-batch)."
)
