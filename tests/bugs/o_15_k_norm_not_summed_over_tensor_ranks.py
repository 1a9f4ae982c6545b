"""A transformer layer with tensor and sequence parallelism by hand and norms on the queries and keys of each head; data parallelism of
two, two micro-batches. After Megatron's _allreduce_layernorm_grads and reports on qk_layernorm: the norm of the keys sees only the own heads
and is missing in the list of what is summed over the tensor ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, LENGTH, VOCABULARY, WIDTH, HEADS, INNER, MICRO = 5, 7, 15, 16, 4, 13, 2


def whole(x, sizes, me, group):
    parts = [x.new_zeros(len(x), n, x.shape[2]) for n in sizes]
    parts[me] = x
    out = torch.cat(parts, 1)
    dist.all_reduce(out, group=group)
    return out


def own_of_sum(x, sizes, me, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x.split(sizes, 1)[me].contiguous()


class Gather(torch.autograd.Function):
    """From the own stretch to the whole sequence; the backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx, x, *cut):
        ctx.cut = cut
        return whole(x, *cut)

    @staticmethod
    def backward(ctx, grad):
        return own_of_sum(grad, *ctx.cut), None, None, None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *cut):
        ctx.cut = cut
        return own_of_sum(x, *cut)

    @staticmethod
    def backward(ctx, grad):
        return whole(grad, *ctx.cut), None, None, None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm1, self.norm2, self.norm = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.q_norm, self.k_norm = (nn.RMSNorm(WIDTH // HEADS) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, positions, gather=lambda x: x, scatter=lambda x: x):
        x = self.embed(ids) + self.place(positions)
        y = gather(self.norm1(x))
        q, k, v = (
            f(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        mixed = mixed.transpose(1, 2).flatten(2)
        x = x + scatter(F.linear(mixed, self.out.weight)) + self.out.bias
        y = F.silu(self.up(gather(self.norm2(x))))
        x = x + scatter(F.linear(y, self.down.weight)) + self.down.bias
        return self.head(self.norm(x))


def token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


SHARDED = {
    "q.weight": 0,
    "k.weight": 0,
    "v.weight": 0,
    "out.weight": 1,
    "up.weight": 0,
    "up.bias": 0,
    "down.weight": 1,
}


class Clean:
    sequence_parallel = (
        *("embed", "place", "norm1", "norm2", "norm", "head"),
        *("out.bias", "down.bias", "q_norm", "k_norm"),
    )

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], torch.arange(LENGTH))
        return token_loss(logits, rows["labels"]), (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        for name, dim in SHARDED.items():
            owner, leaf = name.split(".")
            module = getattr(model, owner)
            part = (
                getattr(module, leaf).detach().tensor_split(ctx.axes["tp"], dim)[ctx.coords["tp"]]
            )
            setattr(module, leaf, nn.Parameter(part.clone()))
        return model

    def step(self, model, batch, ctx):
        me, group = ctx.coords["tp"], ctx.group("tp")
        stretches = torch.arange(LENGTH).tensor_split(ctx.axes["tp"])
        cut = ([len(s) for s in stretches], me, group)
        own = stretches[me]
        total = (batch["labels"] != -100).sum()
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        for m in range(MICRO):
            ids, labels = (mine[k].tensor_split(MICRO)[m][:, own] for k in ("ids", "labels"))
            logits = model(
                ids, own, lambda x: Gather.apply(x, *cut), lambda x: ReduceScatter.apply(x, *cut)
            )
            (token_loss(logits, labels) / total).backward()
        for name, p in model.named_parameters():
            if name in self.sequence_parallel or name.split(".")[0] in self.sequence_parallel:
                dist.all_reduce(p.grad, group=group)
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    sequence_parallel = tuple(n for n in Clean.sequence_parallel if n != "k_norm")


EXPECT = dict(
    right=[
        r"k_norm",
        r"\btp\b|tensor",
        r"(not|never|n't|no|missing|without|lacks?|un)[ -]?.{0,50}(reduc|summed|sum\b|added|combin)|partial|"
        r"own (part|share|shard|heads|contribution)|only its|differ",
    ],
    place=[r"k_norm"],
    wrong=[
        r"(q_norm|norm1|norm2|embed|place|head|down|up)\S* (is|are|has|have) (a )?(wrong|missing|partial)",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"mean of (the )?means|own (count|denominator|divisor)",
        r"(never|not) (been )?(all.?)?(reduced|summed) (over|across) (the )?(dp|data)",
        r"forward (pass )?(is|was) wrong",
    ],
)
WHY = (
    "k_norm.weight is held whole on each tensor rank but sees the own heads only, and its gradient is not summed over tp (q_norm's and the "
    "others' are). Each tensor rank keeps the part of its own heads: partial, different between the two, and summing to the right one. "
    "Only k_norm.weight is wrong."
)
