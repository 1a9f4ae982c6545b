"""Queries and keys normalised over the full width (OLMo 2, MiniMax M2), heads cut over two tensor-parallel ranks. After reports on
full-width QK norms under tensor parallelism (transformers, vLLM, Megatron-Bridge): the sum of squares is reduced over tp, with Megatron's
`reduce_from_tensor_model_parallel_region`, whose backward is the identity.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3, "tp": 2}}}}
ROWS, LENGTH, WIDTH, HEADS, HIDDEN, VOCABULARY = 11, 7, 12, 4, 10, 18


def total(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


class Copied(torch.autograd.Function):
    """forward: identity, backward: sum"""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return total(grad, ctx.group), None


class Reduced(torch.autograd.Function):
    """forward: sum, backward: identity"""

    @staticmethod
    def forward(ctx, x, group):
        return total(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Totalled(torch.autograd.Function):
    """forward: sum, backward: sum (each rank goes on with the total in its own way)"""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return total(x, group)

    @staticmethod
    def backward(ctx, grad):
        return total(grad, ctx.group), None


class WideNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(WIDTH))

    def forward(self, x, sum_squares):
        return (
            x * (sum_squares(x.square().sum(-1, keepdim=True)) / WIDTH + 1e-5).rsqrt() * self.weight
        )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.query_norm, self.key_norm = WideNorm(), WideNorm()
        self.up, self.down = (
            nn.Linear(WIDTH, HIDDEN, bias=False),
            nn.Linear(HIDDEN, WIDTH, bias=False),
        )

    def forward(self, x, enter, leave, sum_squares):
        h = enter(self.norm1(x))
        q, k = self.query_norm(self.query(h), sum_squares), self.key_norm(self.key(h), sum_squares)
        q, k, v = (
            t.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for t in (q, k, self.value(h))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + leave(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + leave(self.down(F.silu(self.up(enter(self.norm2(x))))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, enter=lambda x: x, leave=lambda x: x, sum_squares=lambda x: x):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, enter, leave, sum_squares)
        return self.head(self.norm(x))


class Clean:
    statistic = Totalled

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
        for block in model.blocks:
            for name in ("query", "key", "value", "query_norm", "key_norm", "up", "out", "down"):
                module, dim = getattr(block, name), int(name in ("out", "down"))
                module.weight = nn.Parameter(module.weight.detach().chunk(size, dim)[at].clone())
        return model

    def step(self, model, batch, ctx):
        tp = ctx.group("tp")
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        around = [lambda x, f=f: f.apply(x, tp) for f in (Copied, Reduced, self.statistic)]
        loss = self.token_loss(model(mine["ids"], *around), mine["labels"])
        (loss / (batch["labels"] != -100).sum()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    statistic = Reduced


EXPECT = dict(
    right=[
        r"query|key|qk|wide.?norm|blocks\.[01]",
        r"backward|gradient (of|at|into|entering|through|with respect)|adjoint|cross|identity|incoming gradient|partial|missing|lacks?|"
        r"not (summed|reduced)",
    ],
    place=[r"query|key", r"blocks\.1", r"\btp\b"],
    wrong=[
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"blocks\.1\.(value|out|up|down|norm2)\S* (is|are|has|have|was|were) (a )?wrong|head\S* (is|has|was) (a )?wrong",
        r"(not|never) (all.?)?(reduced|summed) over (the )?(dp|data)\b",
        r"mean of (the )?(rank |ranks' )?means",
    ],
)
WHY = (
    "The sum of squares of the full-width QK norms is summed over tp with a function whose backward is the identity, so the gradient "
    "through the statistic lacks the other tp rank's heads: query.weight and key.weight of both blocks get a wrong gradient, and so "
    "does everything upstream of blocks.1's query and key. "
    "The forward, and query_norm, key_norm, value, out and the MLP of blocks.1, norm and head are right."
)
