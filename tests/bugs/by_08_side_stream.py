"""A pipeline of three stages, four micro-batches (all forward, then all backward). Two tensors cross each boundary: the hidden state and a side stream made of a row's context vector, which each later stage refines
and adds to its hidden state for rows that have a context. Micro-batches without any context row do not use the side stream, and no gradient is sent back for it; the receiver has a fixed pair of buffers for the gradients.

The bug: if none comes, the buffer for the side stream's gradient is passed on as it is, with what an earlier micro-batch left in it. After pipeline engines with persistent gradient buffers (DeepSpeed's
PipelineEngine and forks) and outputs whose gradient is None in some micro-batches.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, MICRO, INPUTS, CONTEXT, WIDTH, CLASSES = 11, 4, 5, 3, 7, 4
HAS_CONTEXT = [1, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0]


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.hidden = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.context = nn.Sequential(nn.Linear(CONTEXT, 6), nn.Tanh(), nn.Linear(6, WIDTH))

    def forward(self, x, context):
        h = torch.tanh(self.embed(x))
        return h + torch.tanh(self.hidden(h)), self.context(context)


class Later(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.hidden = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.refine, self.cross = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h, side, has):
        side = side + torch.tanh(self.refine(side))
        if has.any():
            h = h + has[:, None] * self.cross(side)
        return h + torch.tanh(self.hidden(self.norm(h))), side


class Staged(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([First(), Later(), Later()])
        self.head = nn.Linear(WIDTH, CLASSES)


class Boundary:
    """Fixed buffers for the gradients that come back from the next stage."""

    def __init__(self, h, side, next_rank):
        self.hidden, self.side = torch.zeros_like(h), torch.zeros_like(side)
        self.next_rank = next_rank

    def receive(self, n, has):
        dist.recv(self.hidden[:n], self.next_rank)
        if has.any():
            dist.recv(self.side[:n], self.next_rank)
        else:
            self.side.zero_()
        return self.hidden[:n], self.side[:n]


class PersistentBoundary(Boundary):
    def receive(self, n, has):
        dist.recv(self.hidden[:n], self.next_rank)
        if has.any():
            dist.recv(self.side[:n], self.next_rank)
        return self.hidden[:n], self.side[:n]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Staged()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "context": torch.randn(ROWS, CONTEXT, generator=g),
            "has": torch.tensor(HAS_CONTEXT),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        h, side = model.stages[0](rows["x"], rows["context"])
        for stage in model.stages[1:]:
            h, side = stage(h, side, rows["has"])
        return F.cross_entropy(model.head(h), rows["y"], reduction="sum"), len(rows["y"])

    def distribute(self, model, ctx):
        for i in range(3):
            if i != ctx.coords["pp"]:
                model.stages[i] = nn.Identity()
        if ctx.coords["pp"] != 2:
            model.head = nn.Identity()
        return model

    def boundary(self, h, side, next_rank):
        return Boundary(h, side, next_rank)

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        ranks, at = dist.get_process_group_ranks(ctx.group("pp")), ctx.coords["pp"]
        stage, kept = model.stages[at], []
        for m in range(MICRO):
            part = {k: v.tensor_split(MICRO)[m] for k, v in batch.items()}
            if at == 0:
                entered, left = (), stage(part["x"], part["context"])
            else:
                like = next(model.parameters())
                entered = tuple(like.new_empty(len(part["y"]), WIDTH) for _ in range(2))
                for x in entered:
                    dist.recv(x.detach(), ranks[at - 1])
                entered = tuple(x.detach().requires_grad_() for x in entered)
                left = stage(*entered, part["has"])
            if at < 2:
                for x in left:
                    dist.send(x.detach().contiguous(), ranks[at + 1])
            kept.append((part, entered, left))
        if at < 2:
            boundary = self.boundary(*(x.detach() for x in kept[0][2]), ranks[at + 1])
        for part, entered, left in kept:
            if at == 2:
                loss = F.cross_entropy(model.head(left[0]), part["y"], reduction="sum")
                (loss / ROWS).backward()
            else:
                torch.autograd.backward(left, boundary.receive(len(part["y"]), part["has"]))
            if at > 0:
                dist.send(entered[0].grad, ranks[at - 1])
                if part["has"].any():
                    dist.send(entered[1].grad, ranks[at - 1])


class Buggy(Clean):
    def boundary(self, h, side, next_rank):
        return PersistentBoundary(h, side, next_rank)


EXPECT = dict(
    right=[
        r"side|context|second (tensor|gradient|output|buffer|stream)|boundary",
        r"stale|old|earlier|previous|left (over|in)|not (zeroed|cleared|reset)|remain|again|kept|reused|persist|micro.?batch 0|another micro.?batch|last received",
        r"gradient|buffer|backward",
    ],
    place=[
        r"PersistentBoundary|Boundary",
        r"\breceive\b",
        r"self\.side|side.{0,30}buffer",
        r"refine|\.context",
    ],
    wrong=[
        r"hidden.{0,40}(stale|swapped|wrong gradient)|gradients? .{0,20}swapped",
        r"(missing|not) .{0,15}all.?reduced|tied",
        r"labels? of (another|other)|wrong micro.?batch.{0,30}(label|input|activation)|activation.{0,30}overwritten",
        r"gradient.{0,40}side.{0,30}(lost|dropped|missing)|divisor|mean of means",
    ],
)
WHY = (
    "For micro-batches 1 and 3, which have no row with a context, the next stage sends no gradient of the side stream, so it is zero. PersistentBoundary.receive returns its buffer nevertheless, which still holds that of "
    "micro-batch 0 or 2, and the stage walks back with it. Stage 0 gets too much in its context network, stage 1 in refine (its cross and hidden path, and what it sends back, stay right); stage 2 receives nothing and is "
    "right. Fix: zero the buffer (or pass None) if nothing comes."
)
