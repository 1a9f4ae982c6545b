"""FSDP2 (fully_shard on two blocks and the root) on two ranks with four micro-batches of unlike size: the gradients are kept as a running mean over the tokens seen so far by all ranks (before a micro-batch, what is there is multiplied by
seen / (seen +
new); the micro-batch's loss is divided by seen + new), so that the loop can stop at any time. The token numbers come from the batch.

The bug: to save communication, the gradient synchronisation is switched off up to the last micro-batch. FSDP2 then keeps what it has accumulated unsharded, inside; p.grad is None, the multiplication passes over it in silence, and early
micro-batches keep
their too small divisors. After ml-explore/mlx-lm PR 1544 (running token-weighted mean) and pytorch/torchtitan PR 1710 with pytorch/pytorch PR 118298 (accumulation without reduction).
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
TOKENS, VOCABULARY, WIDTH = 7, 9, 6
LENGTHS = [3, 7, 2, 5, 6, 1, 4, 7, 2, 5, 3]
PARTS = [[(0, 1), (1, 3), (3, 4), (4, 6)], [(6, 7), (7, 8), (8, 10), (10, 11)]]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        y = y + torch.tanh(self.mix(F.pad(y, (0, 0, 1, 0))[:, :-1]))
        return x + self.down(F.gelu(self.up(y)))


class Net(nn.Module):
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


def token_loss(model, rows):
    there = torch.arange(TOKENS)[None] < rows["lengths"][:, None]
    return F.cross_entropy(model(rows["ids"])[there], rows["labels"][there], reduction="sum")


class Clean:
    defer = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        shape = (len(LENGTHS), TOKENS)
        return {
            "ids": torch.randint(VOCABULARY, shape, generator=g),
            "labels": torch.randint(VOCABULARY, shape, generator=g),
            "lengths": torch.tensor(LENGTHS),
        }

    def loss_sum(self, model, rows):
        return token_loss(model, rows), int(rows["lengths"].sum())

    def distribute(self, model, ctx):
        mesh = ctx.mesh["dp"] if hasattr(ctx, "mesh") else None
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def step(self, model, batch, ctx):
        seen = 0
        for turn in range(4):
            if self.defer:
                model.set_requires_gradient_sync(turn == 3)
            new = sum(int(batch["lengths"][a:b].sum()) for a, b in (part[turn] for part in PARTS))
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(seen / (seen + new))
            seen += new
            low, high = PARTS[ctx.rank][turn]
            rows = {k: v[low:high] for k, v in batch.items()}
            (token_loss(model, rows) * ctx.world_size / seen).backward()


class Buggy(Clean):
    defer = True


EXPECT = dict(
    right=[
        r"(?i)micro.?batch(es)?",
        r"(?i)scal|weight(ed|s)?\b|factor|divi[ds]|divisor|normali[sz]|too (much"
        r"|large|big|heav)|coefficient|count|mean|times",
        r"(?i)early|earlier|first|before|accumul|micro.?batch(es)? .{0,30}(0|1|2"
        r"|too)|seen|running|each",
    ],
    place=[r"(?i)micro.?batch|accumul|divisor|factor|weight"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(never|not) (been )?(all.?)?reduced|not summed|local gradient",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank \d|rank \d alone|ranks (differ|disagree)",
        r"(?i)adjoint|backward of .{0,20}(is|are) wrong",
        r"(?i)\b(embed|head|blocks?)\b\S* (alone|only)",
        r"(?i)only the last micro.?batch (is )?(counted|there|left|reduced)",
        r"(?i)last micro.?batch .{0,20}(too (large|small)|wrong)",
    ],
)
WHY = (
    "Forward, rows, losses and each micro-batch's backward are right, and everything is reduced once, in the last micro-batch. But the micro-batches' divisors differ: tokens of both ranks are 7, 16, 12 and 10, so seen is 7, 23, 35 and "
    "45. Micro-batch 0 keeps 1/7, "
    "micro-batch 1 1/23, micro-batch 2 1/35, where all should end with 1/45: p.grad is None before micro-batches 1, 2 and 3, because the gradients lie in unsharded_accumulated_grad, and the multiplications by 7/23, 23/35 and 35/45 do "
    "not happen. So micro-batch 0 counts 45/7 "
    "times, micro-batch 1 45/23 times, micro-batch 2 45/35 times too much, micro-batch 3 (the last) is right; the same on both ranks and for all parameters and rows of the micro-batch. Fix: synchronise every micro-batch, or divide "
    "once by the final number."
)
