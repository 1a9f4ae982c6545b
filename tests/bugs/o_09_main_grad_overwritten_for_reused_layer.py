"""A universal transformer (one block applied three times) whose linear layers add their weight gradients into a main_grad buffer inside
the backward, as with gradient accumulation fusion; data parallelism of four, two micro-batches. After Transformer Engine / Megatron
reports on `overwrite_main_grad`: the first micro-batch overwrites the buffer to spare the zeroing, but a reused weight comes several times.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
ROWS, LENGTH, VOCABULARY, WIDTH, HEADS, DEPTH, MICRO = 13, 5, 15, 8, 2, 3, 2


class FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, keep):
        ctx.save_for_backward(x, weight)
        ctx.keep = keep
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        ctx.keep(weight, dy.flatten(0, -2).T @ x.flatten(0, -2))
        return dy @ weight, None, None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.depth = nn.Embedding(DEPTH, WIDTH)
        self.norm1, self.norm2, self.norm = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 12, bias=False)
        self.down = nn.Linear(12, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, linear=F.linear):
        x = self.embed(ids)
        for i in range(DEPTH):
            y = self.norm1(x + self.depth.weight[i])
            q, k, v = (
                t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
                for t in linear(y, self.qkv.weight).chunk(3, -1)
            )
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + linear(mixed.transpose(1, 2).flatten(2), self.out.weight)
            x = x + linear(F.gelu(linear(self.norm2(x), self.up.weight)), self.down.weight)
        return linear(self.norm(x), self.head.weight)


def token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    def loss_sum(self, model, rows):
        return token_loss(model(rows["ids"]), rows["labels"]), (rows["labels"] != -100).sum()

    def keep(self, weight, grad):
        if weight in self.main_grad:
            self.main_grad[weight].add_(grad)
        else:
            self.main_grad[weight] = grad

    def step(self, model, batch, ctx):
        self.main_grad = {}
        total = (batch["labels"] != -100).sum()
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        by_name = {id(p): n for n, p in model.named_parameters()}

        def linear(x, weight):
            name = by_name[id(weight)]
            return FusedLinear.apply(x, weight, lambda _, grad: self.keep(name, grad))

        for m in range(MICRO):
            self.micro = m
            ids, labels = (mine[k].tensor_split(MICRO)[m] for k in ("ids", "labels"))
            (token_loss(model(ids, linear), labels) / total).backward()
        for name, p in model.named_parameters():
            if name in self.main_grad:
                p.grad = self.main_grad[name].contiguous()
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def keep(self, weight, grad):
        if self.micro == 0:
            self.main_grad[weight] = grad  # spares the zeroing
        else:
            self.main_grad[weight].add_(grad)


EXPECT = dict(
    right=[
        r"qkv|\bout\b|\bup\b|\bdown\b",
        r"micro|reuse|shared|several|three times|(first|last|one|some|single) (use|call|application|pass)|calls?|overwrit|"
        r"lost|lacks?|missing|dropp|accumul|partial",
    ],
    place=[r"qkv", r"\bout\b", r"\bup\b", r"\bdown\b"],
    wrong=[
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"mean of (the )?means|own (count|denominator|divisor)",
        r"(head|embed|norm1|norm2|depth)\S* (is|are|has|have) (a )?(wrong|missing|partial)",
        r"forward (pass )?(is|was) wrong",
        r"(never|not) (been )?(all.?)?reduced",
    ],
)
WHY = (
    "In the first micro-batch the weight gradient overwrites main_grad. qkv, out, up and down are used three times in each forward, so of "
    "the first micro-batch only the use whose backward comes last (the first application) stays; the later micro-batch is added in full. "
    "head (used once), embed, depth and the norms are right."
)
