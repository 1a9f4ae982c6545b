"""Data parallel training of a small language model with main_grad buffers: a hook adds each micro-batch's gradient to `param.main_grad` and
frees `.grad`, four micro-batches, unequal rows on three ranks. After reports on gradient accumulation fusion: `.grad` is freed in the branch of the
matrices alone.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH, HEADS, MICRO = 13, 5, 24, 12, 4, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 25), nn.Linear(25, WIDTH)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block = Block()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        return self.head(self.norm(self.block(self.embed(ids) + self.place.weight)))


def token_loss(model, ids):
    logits = model(ids[:, :-1]).flatten(0, 1)
    return F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return LM()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {"ids": torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)}

    def loss_sum(self, model, rows):
        return token_loss(model, rows["ids"]), len(rows["ids"]) * LENGTH

    def accumulate(self, p):
        p.main_grad.add_(p.grad)
        p.grad = None

    def distribute(self, model, ctx):
        for p in model.parameters():
            p.main_grad = torch.zeros_like(p)
            p.register_post_accumulate_grad_hook(self.accumulate)
        return model

    def gradient_of(self, name, param, ctx):
        return param.main_grad

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.main_grad.zero_()
            p.grad = None
        ids = batch["ids"].tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in ids.tensor_split(MICRO):
            (token_loss(model, part) / (ROWS * LENGTH)).backward()
        for p in model.parameters():
            dist.all_reduce(p.main_grad, group=ctx.group("dp"))


class Buggy(Clean):
    def accumulate(self, p):
        p.main_grad.add_(p.grad)
        if p.dim() == 2:  # as the fused kernel does
            p.grad = None


EXPECT = dict(
    right=[
        r"micro.?batch|backward|call",
        r"again|twice|\d times|[234] ?x|accumulat|earlier|prefix|counted|added|more than once",
    ],
    place=[r"bias|norm"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(embed|place|qkv|head)\S*\.weight (is|are|has|have|gets?) .{0,20}wrong",
        r"forward .{0,40}(goes|is) wrong in|gradient that reaches \S* is wrong",
        r"(own|local) (count|denominator|divisor)|mean of (the )?means",
        r"rows .{0,30}(twice|never) (read|seen|on)",
    ],
)
WHY = (
    "The hook adds `.grad` to main_grad and frees it only for matrices. For biases and norm weights `.grad` goes on to accumulate, so main_grad holds the sum "
    "of the running sums: of each rank's four micro-batches the first counts 4 times, the second 3, the third 2, the last once. All biases and the "
    "LayerNorm weights are wrong; matrices and embeddings are right. Forward, backward and the reduction are right."
)
