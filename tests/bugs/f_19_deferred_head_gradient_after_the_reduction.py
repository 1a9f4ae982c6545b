"""The output layer's weight gradient is deferred for the last micro-batches and computed when the pipeline would idle. After
Megatron-LM's defer_embedding_wgrad_compute / delay_wgrad_compute and FAULTS C12-01 (added after the all-reduce): the
queue is emptied after the gradients were summed over dp. Embedding and head are tied.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WIDTH, VOCAB, MICRO_BATCHES, LIMIT = 14, 5, 7, 16, 4, 2


class HeadLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, queue):
        ctx.save_for_backward(x, weight)
        ctx.queue = queue
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        if ctx.queue is None:
            return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2), None
        ctx.queue.append((x.detach(), grad.detach()))
        return grad @ weight, None, None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)
        self.mix = nn.Sequential(nn.Linear(WIDTH, 10), nn.SiLU(), nn.Linear(10, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids, queue=None):
        x = self.embed(ids)
        x = x + self.conv(F.pad(x.mT, (2, 0))).mT
        return HeadLinear.apply(self.norm(x + self.mix(x)), self.embed.weight, queue)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    def loss_sum(self, model, rows, queue=None):
        logits = model(rows["ids"], queue).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum")
        return loss, (rows["labels"] != -100).sum()

    @staticmethod
    @torch.no_grad()
    def drain(model, queue):
        for x, grad in queue:
            model.embed.weight.grad += grad.flatten(0, -2).T @ x.flatten(0, -2)
        queue.clear()

    @staticmethod
    def reduce(model):
        for param in model.parameters():
            dist.all_reduce(param.grad)

    def finish(self, model, queue):
        self.drain(model, queue)
        self.reduce(model)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count, queue = (mine["labels"] != -100).sum(), []
        dist.all_reduce(count)
        for i in range(MICRO_BATCHES):
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            late = queue if i >= MICRO_BATCHES - LIMIT else None
            (self.loss_sum(model, micro, late)[0] / count).backward()
        self.finish(model, queue)


class Buggy(Clean):
    def finish(self, model, queue):
        self.reduce(model)
        self.drain(model, queue)


EXPECT = dict(
    right=[
        r"embed|head|tied|output layer",
        r"last|micro-?batch|after (the )?(all.?)?reduc|too late|late|not (been )?(all.?)?(reduced|summed)|own (rows|part)|defer|"
        r"partial|differ\w* (between|on|across|over)|missing|lack|local|only .{0,30}rows|rows \d",
    ],
    place=[r"embed", r"micro-?batch", r"ranks?", r"rows", r"head"],
    wrong=[
        r"counted (twice|\d times)|reduced (twice|again)",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"(conv|mix|norm)\S* (is|are|was|were) (wrong|missing|(not|never) (reduced|summed))",
        r"mean of (the )?(rank |ranks' )?means",
        r"(first|second) micro-?batch\w* (is|was|are|were) (lost|missing|(not|never) (reduced|summed))",
        r"divided (twice|by)",
    ],
)
WHY = (
    "The head's part of embed.weight's gradient for micro-batches 2 and 3 is added after the sum over dp: each rank has its own rows of them only, and the ranks differ. The embedding's part, the head's part of micro-batches 0 and 1, "
    "and all other parameters are exact."
)
