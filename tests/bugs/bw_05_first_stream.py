"""A decoder in which every block mixes the running stream with the embeddings x0, x = a x + b x0 (as in modded-nanogpt), on a pipeline of three stages: embedding and two blocks, two blocks, one block and
head. Three micro-batches, all forward and then all backward; each stage holds its own layers only.

The bug: the stage's forward is the whole model's with the embedding left out: it sets x0 to what it begins with, which on the later stages is the stream received, not the embeddings, so only one tensor is
sent on. After questions on pipelining value/x0 residuals of the nanogpt speedrun models.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, LENGTH, VOCABULARY, WIDTH = 7, 5, 13, 8
MICRO_BATCHES = 3
STAGES = ((0, 1), (2, 3), (4,))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.tensor([1.0, 0.4]) + 0.2 * torch.randn(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11), nn.GELU(), nn.Linear(11, WIDTH)
        )

    def forward(self, x, x0):
        x = self.mix[0] * x + self.mix[1] * x0
        q, k, v = (t.unsqueeze(1) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        x = x + self.out(y)
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(5)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = x0 = self.tokens(ids)
        for block in self.blocks.values():
            x = block(x, x0)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"]).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum")
        return loss, rows["labels"].numel()

    def distribute(self, model, ctx):
        stage = ctx.coords["pp"]
        for name in list(model.blocks):
            if int(name) not in STAGES[stage]:
                del model.blocks[name]
        if stage > 0:
            del model.tokens
        if stage < len(STAGES) - 1:
            del model.norm, model.head
        return model

    def run_blocks(self, model, begin):
        """begin: the streams at the entrance of the stage, and so is what it returns."""
        x, x0 = begin.unbind(0)
        for block in model.blocks.values():
            x = block(x, x0)
        return torch.stack([x, x0])

    def enter(self, embedded):
        return torch.stack([embedded, embedded])

    def received(self, rows, dtype):
        return torch.empty(2, rows, LENGTH, WIDTH, dtype=dtype)

    def step(self, model, batch, ctx):
        stage, group = ctx.coords["pp"], ctx.group("pp")
        first, last = stage == 0, stage == len(STAGES) - 1
        dtype = next(model.parameters()).dtype
        kept = []
        for n in range(MICRO_BATCHES):
            part = {k: x.tensor_split(MICRO_BATCHES)[n] for k, x in batch.items()}
            if first:
                begin = self.enter(model.tokens(part["ids"]))
            else:
                begin = self.received(len(part["ids"]), dtype)
                dist.recv(begin, ctx.rank - 1, group=group)
                begin.requires_grad_()
            end = self.run_blocks(model, begin)
            if last:
                logits = model.head(model.norm(end[0])).flatten(0, 1)
                end = F.cross_entropy(logits, part["labels"].flatten(), reduction="sum")
                end = end / batch["labels"].numel()
            else:
                dist.send(end.detach().contiguous(), ctx.rank + 1, group=group)
            kept.append((begin, end))
        for begin, end in kept:
            gradient = None
            if not last:
                gradient = torch.empty_like(end)
                dist.recv(gradient, ctx.rank + 1, group=group)
            end.backward(gradient)
            if not first:
                dist.send(begin.grad, ctx.rank - 1, group=group)


class Buggy(Clean):
    def run_blocks(self, model, begin):
        x = x0 = begin[0]
        for block in model.blocks.values():
            x = block(x, x0)
        return x[None]

    def enter(self, embedded):
        return embedded[None]

    def received(self, rows, dtype):
        return torch.empty(1, rows, LENGTH, WIDTH, dtype=dtype)


EXPECT = dict(
    right=[
        r"x0|embedding|first stream|second stream|streams?|residual|mix",
        (
            r"(instead of|rather than|in place of|not the|taken for|never (sent|received|passed|handed)|not (sent|received|passed|handed|forwarded|transmitted)|lost|missing|only (one|x\b|the)|own (input|entrance|beginning)|stage'?s (own )?(input|entrance|beginning)|received (stream|hidden|activation|tensor|x)|what it (received|begins))"
        ),
    ],
    place=[
        r"run_blocks",
        r"\bx0\b",
        r"\benter\b|\breceived\b",
        r"stages? (1|2|one|two)|later stages?|second stage|rank 1",
        r"send|recv",
    ],
    wrong=[
        r"(other|wrong) micro.?batch|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"divisor|mean of means|scaled by the number of micro",
        r"(buffer).{0,30}(reused|shared|overwritten)|tied|reduced twice|never reduced|wrong (rank|peer)",
    ],
)
WHY = (
    "run_blocks takes the stage's own input for x0; on stage 0 that is the embedding, on stages 1 and 2 (blocks 2, 3 and 4) it is the stream the stage before sent, and the embeddings are never sent. The "
    "forward is wrong from block 2 on for every micro-batch, so the gradients of all stages are wrong, and the embedding also lacks what comes back through x0 from later blocks. A right cause says that x0 on "
    "the later stages is the received stream instead of the embeddings (not handed on). Fix: send both streams and the gradients of both."
)
