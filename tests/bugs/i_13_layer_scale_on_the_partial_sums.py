"""Tensor parallelism by hand with a learned scale per channel (CaiT's LayerScale) applied in the epilogue of the row-parallel product,
before the all-reduce. After FAULTS C05-15 (Megatron-LM issue 7452: a replicated weight keeps a partial gradient when sequence parallelism
is off) and torchtitan PR 2106: a sum follows, so the forward is the same.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 3}}}}
ROWS, LENGTH, WIDTH, HEADS, HIDDEN, VOCABULARY = 9, 8, 12, 3, 15, 20


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for p in (self.query, self.key, self.value)
        )
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attention = (
            nn.LayerNorm(WIDTH),
            nn.LayerNorm(WIDTH),
            Attention(),
        )
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.scale1 = nn.Parameter(0.3 + 0.5 * torch.rand(WIDTH))
        self.scale2 = nn.Parameter(0.3 + 0.5 * torch.rand(WIDTH))

    def forward(self, x, enter, leave):
        x = x + leave(self.scale1 * self.attention(enter(self.norm1(x))))
        return x + leave(self.scale2 * self.down(F.gelu(self.up(enter(self.norm2(x))))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, enter=lambda x: x, leave=lambda x: x):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, enter, leave)
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
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.token_loss(model(rows["ids"]), rows["labels"]), (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        size, at = ctx.axes["tp"], ctx.coords["tp"]

        def cut(owner, name, dim):
            param = getattr(owner, name).detach()
            setattr(owner, name, nn.Parameter(param.chunk(size, dim)[at].clone()))

        for block in model.blocks:
            for linear in (
                block.attention.query,
                block.attention.key,
                block.attention.value,
                block.up,
            ):
                cut(linear, "weight", 0)
            cut(block.up, "bias", 0)
            cut(block.attention.out, "weight", 1)
            cut(block.down, "weight", 1)
        return model

    def partial(self, name):
        """Replicated over tp, but used on a partial sum."""
        return ".scale" in name

    def step(self, model, batch, ctx):
        tp = ctx.group("tp")
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        logits = model(mine["ids"], lambda x: Copied.apply(x, tp), lambda x: Summed.apply(x, tp))
        (self.token_loss(logits, mine["labels"]) / (batch["labels"] != -100).sum()).backward()
        for name, param in model.named_parameters():
            dist.all_reduce(
                param.grad, group=ctx.group("dp", "tp") if self.partial(name) else ctx.group("dp")
            )


class Buggy(Clean):
    def partial(self, name):
        return False


EXPECT = dict(
    right=[
        r"scale[12]",
        r"\btp\b|tensor.?parallel",
        r"(not|never|n't|no|missing|without|lacks?|un|only)[ -]?.{0,50}(reduc|summed|sum\b|added|combin|synchroni)|partial|"
        r"own (part|share|heads)|differ\w*",
    ],
    place=[r"scale[12]"],
    wrong=[
        r"\b(norm|query|key|value|out|up|down|embed|head)\S* (is|are|has|have|was|were) (a )?wrong",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"(not|never) (all.?)?(reduced|summed) over (the )?(dp|data)\b",
        r"mean of (the )?(rank |ranks' )?means",
    ],
)
WHY = (
    "scale1 and scale2 are replicated over tp but multiply the partial sum of the rank's own heads or hidden units, so each tp rank "
    "has only a part of their gradient; they are reduced over dp alone, and the three tp ranks hold different parts. "
    "The forward and all other gradients are right."
)
