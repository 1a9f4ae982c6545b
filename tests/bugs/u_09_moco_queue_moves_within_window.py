"""MoCo: a query encoder under DDP, a momentum encoder for the keys, a queue of negatives shared by all ranks; two micro-batches to a step, unlike rows per rank.
The keys of all ranks are enqueued when the step is over (the model's own queue is written after the optimizer).
"""

import contextlib
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, SIZE, WIDTH, QUEUE, MICROS, TEMPERATURE = 11, 6, 7, 14, 2, 0.2


def encoder():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.GELU(), nn.Conv2d(6, 8, 3, stride=2), nn.GELU(), nn.Flatten(),
        nn.Linear(8 * 4, WIDTH),
    )  # fmt: skip


class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = encoder()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        for p in self.key.parameters():
            p.add_(0.05 * torch.randn_like(p))
        self.register_buffer("queue", F.normalize(torch.randn(QUEUE, WIDTH), dim=-1))

    def forward(self, a, b):
        with torch.no_grad():
            k = F.normalize(self.key(b), dim=-1)
        return F.normalize(self.query(a), dim=-1), k


def info_nce(q, k, queue):
    logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ queue.T], 1) / TEMPERATURE
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long), reduction="sum")


def of_all_ranks(k, rows):
    """The keys of all ranks, in the order of ranks; rows: how many each has."""
    parts = [k.new_empty(n, WIDTH) for n in rows]
    parts[dist.get_rank()].copy_(k)
    for rank, part in enumerate(parts):
        dist.broadcast(part, rank)
    return torch.cat(parts)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        with torch.no_grad():
            return MoCo()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        image = torch.randn(ROWS, 3, SIZE, SIZE, generator=g)
        return {
            "a": image + 0.3 * torch.randn(image.shape, generator=g),
            "b": image + 0.3 * torch.randn(image.shape, generator=g),
        }

    def loss_sum(self, model, rows):
        q, k = model(rows["a"], rows["b"])
        return info_nce(q, k, model.queue), len(q)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def negatives(self, start, now):
        return start

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        rows = [len(r) for r in torch.arange(ROWS).tensor_split(ctx.world_size)]
        start, now = model.module.queue.clone(), model.module.queue.clone()
        for i in range(MICROS):
            micro = {k: v.tensor_split(MICROS)[i] for k, v in mine.items()}
            with contextlib.nullcontext() if i == MICROS - 1 else model.no_sync():
                q, k = model(micro["a"], micro["b"])
                loss = info_nce(q, k, self.negatives(start, now))
                (loss * ctx.world_size / ROWS).backward()
            keys = of_all_ranks(k, [len(torch.arange(n).tensor_split(MICROS)[i]) for n in rows])
            now = torch.cat([now[len(keys) :], keys])
        self.next_queue = now  # goes into the model after the optimizer's step


class Buggy(Clean):
    def negatives(self, start, now):
        return now


EXPECT = dict(
    right=[
        r"queue|negatives|logits|loss|matmul|cross_entropy|\bcat\b|keys",
        r"micro.?batch|second|backward|call|last|queue|elements|columns|classes|argument|other",
    ],
    place=[r"queue|negatives|loss|logits|cross_entropy|matmul|info_nce|query"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"(own|local) (count|denominator|divisor)",
        r"(query|key)\S* .{0,10}goes wrong|goes wrong in (the )?(query|key)",
        r"backward of query.{0,20} (is|goes) wrong",
        r"first (micro.?batch|backward) is wrong|rows? .{0,20}(never read|read twice)",
    ],
)
WHY = (
    "The loss of the second micro-batch uses the queue into which the first micro-batch's keys (6 of all ranks) have already gone, instead of the queue that the step began with: the oldest 6 of 14 negatives are "
    "replaced by the newest keys. So on all ranks the second micro-batch has other logits and another loss, and the gradients that reach the query encoder from it are wrong; the first micro-batch, both "
    "encoders' forward, divisor and reduction are right. All micro-batches of a step must see the same queue."
)
