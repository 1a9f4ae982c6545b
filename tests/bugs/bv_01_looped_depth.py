"""A looped transformer (recurrent depth, each token passes the same three blocks twice, the embedding is injected anew in each loop) on a circular pipeline: rank s holds block s, rank 0 the embedding
and the injection, rank 2 the head. What leaves the last rank in the first loop goes round to rank 0 and enters the second loop there. GPipe over three micro-batches by hand with send/recv.

The bug: the backward helpers were taken over from the linear pipeline, "the first stage has nobody before it, the last one nobody behind it": rank 0 does not send back the gradient of what came round
from the last rank, and the last rank starts the first loop's backward with zeros. After the wrap-around links of circular pipelines (praxis/MaxText "circular repeats", looped pipelines in torchtitan and
Megatron's virtual stages, where the same test on the rank instead of on the virtual stage was reported).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, LENGTH, WORDS, WIDTH, LOOPS, MICRO = 7, 5, 13, 6, 2, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(LENGTH, LENGTH)
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, h):
        z = self.norm(h)
        z = z + self.mix(z.transpose(1, 2)).transpose(1, 2)
        return h + self.down(F.gelu(self.up(z)))


class Looped(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.inject = nn.Linear(2 * WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Looped()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def loss_sum(self, model, rows):
        e = model.embed(rows["ids"])
        h = torch.zeros_like(e)
        for _ in range(LOOPS):
            h = model.inject(torch.cat([h, e], -1))
            for block in model.blocks:
                h = block(h)
        return self.criterion(model, h, rows), rows["labels"].numel()

    @staticmethod
    def criterion(model, h, rows):
        return F.cross_entropy(
            model.head(h).flatten(0, 1), rows["labels"].flatten(), reduction="sum"
        )

    def distribute(self, model, ctx):
        for s in range(3):
            if s != ctx.rank:
                model.blocks[s] = nn.Identity()
        if ctx.rank != 0:
            model.embed, model.inject = nn.Identity(), nn.Identity()
        if ctx.rank != 2:
            model.head = nn.Identity()
        return model

    def forward_stage(self, model, x, part, ctx):
        if ctx.rank == 0:
            x = model.inject(torch.cat([x, model.embed(part["ids"])], -1))
        return model.blocks[ctx.rank](x)

    def recv_forward(self, like, loop, ctx):
        x = torch.zeros_like(like)
        if ctx.rank > 0 or loop > 0:
            dist.recv(x, (ctx.rank - 1) % ctx.world_size)
        return x.requires_grad_()

    def send_forward(self, y, loop, ctx):
        if ctx.rank < ctx.world_size - 1 or loop < LOOPS - 1:
            dist.send(y.detach().contiguous(), (ctx.rank + 1) % ctx.world_size)

    def recv_backward(self, y, loop, ctx):
        grad = torch.zeros_like(y)
        if ctx.rank < ctx.world_size - 1 or loop < LOOPS - 1:
            dist.recv(grad, (ctx.rank + 1) % ctx.world_size)
        return grad

    def send_backward(self, x, loop, ctx):
        if ctx.rank > 0 or loop > 0:
            dist.send(x.grad.contiguous(), (ctx.rank - 1) % ctx.world_size)

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        dtype = next(model.parameters()).dtype
        parts = [{k: v.tensor_split(MICRO)[n] for k, v in batch.items()} for n in range(MICRO)]
        saved = {}
        for n, part in enumerate(parts):
            for loop in range(LOOPS):
                like = torch.zeros(*part["ids"].shape, WIDTH, dtype=dtype)
                x = self.recv_forward(like, loop, ctx)
                y = self.forward_stage(model, x, part, ctx)
                self.send_forward(y, loop, ctx)
                saved[n, loop] = x, y
        for n, part in enumerate(parts):
            for loop in reversed(range(LOOPS)):
                x, y = saved.pop((n, loop))
                if ctx.rank == ctx.world_size - 1 and loop == LOOPS - 1:
                    (self.criterion(model, y, part) / batch["labels"].numel()).backward()
                else:
                    y.backward(self.recv_backward(y, loop, ctx))
                self.send_backward(x, loop, ctx)


class Buggy(Clean):
    def recv_backward(self, y, loop, ctx):
        grad = torch.zeros_like(y)
        if ctx.rank < ctx.world_size - 1:
            dist.recv(grad, ctx.rank + 1)
        return grad

    def send_backward(self, x, loop, ctx):
        if ctx.rank > 0:
            dist.send(x.grad.contiguous(), ctx.rank - 1)


EXPECT = dict(
    right=[
        r"gradient|backward|adjoint|cotangent|way back|x\.grad",
        r"(not|never|no|nothing|missing|lost|without|lacks?|drop|cut|zero|absent|stops?|ends?|only|none|fewer).{0,120}(sent|send|receiv|recv|pass|return|hand|flow|reach|back|gradient|link|loop)"
        r"|(sent|send|receiv|recv|pass|return|hand|flow|reach|back|gradient|link|loop).{0,120}(not|never|nothing|missing|lost|lacks?|drop|cut|zero|absent|stops?|no )",
        r"loop|wrap|round|circular|(rank|stage) 0.{0,120}(last|rank 2|stage 2)|(last|rank 2|stage 2).{0,120}(rank|stage) 0|0 *(->|to|→) *2|2 *(->|to|→) *0|first (stage|rank)|first pass|last (stage|rank)",
    ],
    place=[
        r"send_backward",
        r"recv_backward",
        r"wrap|circular|first loop|loop 0|loop == 0|earlier loop",
        r"rank 0.{0,60}rank 2|rank 2.{0,60}rank 0",
        r"zeros_like",
    ],
    wrong=[
        r"wrong micro.?batch|micro.?batch(es)? .{0,30}(overwritten|lost|dropped)|only the last micro.?batch",
        r"divisor|mean of means|counted (twice|two times)|reduced (twice|again)",
        r"(wrong|other) (rows|labels|targets|activation)|forward .{0,30}(wrong|not sent)",
        r"(embedding|tied).{0,40}not (summed|reduced)",
    ],
)
WHY = (
    "The state goes round from rank 2 to rank 0 between the two loops, but send_backward and recv_backward know a line only: rank 0 never sends the gradient of the received state back, and rank 2 starts the "
    "backward of loop 0 with zeros. So the whole first loop gets no gradient: the blocks of all three ranks and the injection and embedding on rank 0 have the second loop's share alone, in all three "
    "micro-batches; the head on rank 2 is right, and so are forward and loss. A right cause says that the gradient across the wrap-around link (rank 0 back to the last rank) is missing. Fix: test the virtual "
    "stage (rank and loop) and send modulo the world size, as the forward helpers do."
)
