"""A V-shaped pipeline (ZB-V / DualPipeV placement): three ranks, six chunks, rank r holds chunks r and 5 - r. The bottom of the V is on one rank, so chunk 2 gives its output to chunk 3 without send and receive.
PyTorch's stage says why the handed-over tensor must be a fresh leaf (torch.distributed.pipelining `set_local_fwd_input`, pytorch PR 131762 / 138125: "mark the activation as a leaf tensor since it will serve as the input tensor for a
fresh autograd graph, not part of the previous stage's autograd graph"); hand-written schedules of torchtitan and Megatron forks pass the tensor itself, and `retain_graph=True` makes the error message go away.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
VOCABULARY, LENGTH, WIDTH, ROWS, MICRO, CHUNKS = 19, 5, 8, 10, 4, 6


class Chunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.value, self.gate = nn.Linear(WIDTH, 13), nn.Linear(WIDTH, 13)
        self.out = nn.Linear(13, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        h = h + h.cumsum(1) / LENGTH
        return x + self.out(torch.sigmoid(self.gate(h)) * self.value(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.chunks = nn.ModuleList(Chunk() for _ in range(CHUNKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        for chunk in self.chunks:
            x = chunk(x)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
        }

    @staticmethod
    def total(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.total(model(rows["ids"]), rows["labels"]), rows["labels"].numel()

    @staticmethod
    def owner(chunk):
        return min(chunk, CHUNKS - 1 - chunk)

    def distribute(self, model, ctx):
        me = ctx.mesh.get_local_rank("pp")
        for c in range(CHUNKS):
            if self.owner(c) != me:
                model.chunks[c] = nn.Identity()
        if me != 0:
            model.embed, model.head = nn.Identity(), nn.Identity()
        return model

    def hand_over(self, y):
        """From chunk to chunk on the same rank."""
        return y.detach().requires_grad_()

    def step(self, model, batch, ctx):
        me = ctx.mesh.get_local_rank("pp")
        rank_of = [int(ctx.mesh.mesh[self.owner(c)]) for c in range(CHUNKS)]
        parts = [{k: v.tensor_split(MICRO)[m] for k, v in batch.items()} for m in range(MICRO)]
        number, stash = batch["labels"].numel(), {}

        for m, part in enumerate(parts):
            shape = (*part["ids"].shape, WIDTH)
            for c in range(CHUNKS):
                if self.owner(c) != me:
                    continue
                if c == 0:
                    x, y = None, model.chunks[0](model.embed(part["ids"]))
                else:
                    if self.owner(c - 1) == me:
                        x = self.hand_over(stash[m, c - 1][1])
                    else:
                        x = torch.empty(shape, dtype=ctx.dtype)
                        dist.recv(x, rank_of[c - 1])
                        x.requires_grad_()
                    y = model.chunks[c](x)
                if c == CHUNKS - 1:
                    y = self.total(model.head(y), part["labels"]) / number
                elif self.owner(c + 1) != me:
                    dist.send(y.detach(), rank_of[c + 1])
                stash[m, c] = x, y

        for m, part in enumerate(parts):
            shape = (*part["ids"].shape, WIDTH)
            for c in reversed(range(CHUNKS)):
                if self.owner(c) != me:
                    continue
                x, y = stash[m, c]
                if c == CHUNKS - 1:
                    g = None
                elif self.owner(c + 1) == me:
                    g = stash[m, c + 1][0].grad.detach().clone()
                else:
                    g = torch.empty(shape, dtype=ctx.dtype)
                    dist.recv(g, rank_of[c + 1])
                # the graph lives as long as the stash (a schedule with separate weight gradients walks it again)
                torch.autograd.backward(y, g, retain_graph=True)
                if c > 0 and self.owner(c - 1) != me:
                    dist.send(x.grad, rank_of[c - 1])


class Buggy(Clean):
    def hand_over(self, y):
        y.retain_grad()
        return y


EXPECT = dict(
    right=[
        r"(?i)twice|double|two times|factor (of )?2|\b2(\.0+)? ?(x|times)|2x|times 2|\b2\.0+\b|by 2\b|again",
        r"(?i)chunks?\.?.{0,3}[012]\b|chunks? 0|first (three|half)|lower half|embed|upstream|hand.?over|chunk 2",
        r"(?i)backward|graph|gradient|detach|hand.?over|retain",
    ],
    place=[
        r"(?i)chunks?\W{0,3}2\b|hand.?over|last rank|rank 2|chunks?\.?.{0,3}[012]\b|between chunk|bottom"
    ],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)chunks\.[345]\S* (is|are) (wrong|doubled|too large|twice)|head\S* (is|are) (wrong|doubled|too large|twice)",
        r"(?i)all_?.?reduce.{0,30}(twice|again)|reduced (twice|again)|summed over (two|2) ranks",
        r"(?i)micro.?batch(es)? .{0,30}(lost|missing|dropped|counted twice|run twice)",
        r"(?i)loss .{0,30}(divided|divisor|not divided)|divides? by (the )?wrong",
        r"(?i)tied|shared weight",
    ],
)
WHY = (
    "On rank 2 (bottom of the V) chunk 3 takes the output of chunk 2 with its graph instead of a detached leaf. The backward of chunk 3 therefore runs on through chunk 2 into chunk 2's received input, and then the backward of chunk 2 itself, with the same gradient, runs through it a second time "
    "(retain_graph=True keeps it from raising). Chunk 2's parameters (rank 2) get exactly twice their gradient; the input gradient of chunk 2 also has accumulated twice, is sent doubled to rank 1 and makes chunk 1 (rank 1), chunk 0 and embed (rank 0) exactly twice too large, in every micro-batch. "
    "chunks.3, chunks.4, chunks.5 and head are right, and so are forward and loss. Fix: hand over y.detach().requires_grad_()."
)
