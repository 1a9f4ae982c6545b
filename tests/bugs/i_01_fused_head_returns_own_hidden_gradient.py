"""A decoder whose output layer and cross entropy are one operator, the vocabulary cut over three tensor-parallel ranks, with data
parallelism of two. After FAULTS C19-11 (apple/ml-cross-entropy PR 42: must the gradient of the hidden states be the same on all
tensor-parallel ranks?): the operator returns what its own vocabulary rows give, the caller takes it for the whole.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 3}}}}
ROWS, LENGTH, WIDTH, HEADS, VOCABULARY = 7, 9, 8, 2, 23


class FusedLoss(torch.autograd.Function):
    """The sum of the token losses; both gradients are formed in the forward, as the fused kernels do."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, first, group, hidden_grad):
        logits = hidden @ weight.T
        top = logits.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        p = (logits - top[:, None]).exp()
        total = p.sum(-1)
        dist.all_reduce(total, group=group)
        inside = (labels >= first) & (labels < first + len(weight))
        column = (labels - first).masked_fill(~inside, 0)
        rows = torch.arange(len(labels))
        hit = (logits[rows, column] - top) * inside
        dist.all_reduce(hit, group=group)
        valid = labels != -100
        d = p / total[:, None]
        d[rows, column] -= inside.to(d.dtype)
        d = d * valid[:, None]
        ctx.save_for_backward(hidden_grad(d @ weight, group), d.T @ hidden)
        return ((total.log() - hit) * valid).sum()

    @staticmethod
    def backward(ctx, grad):
        d_hidden, d_weight = ctx.saved_tensors
        return grad * d_hidden, grad * d_weight, None, None, None, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    def loss_sum(self, model, rows):
        logits, labels = model.head(model(rows["ids"])), rows["labels"]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (
            labels != -100
        ).sum()

    def distribute(self, model, ctx):
        shards = torch.arange(VOCABULARY).tensor_split(ctx.axes["tp"])
        self.mine = shards[ctx.coords["tp"]]
        model.head.weight = nn.Parameter(model.head.weight.detach()[self.mine].clone())
        return model

    @staticmethod
    def hidden_grad(partial, group):
        dist.all_reduce(partial, group=group)
        return partial

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        hidden, labels = model(mine["ids"]).flatten(0, 1), mine["labels"].flatten()
        loss = FusedLoss.apply(
            hidden, model.head.weight, labels, int(self.mine[0]), ctx.group("tp"), self.hidden_grad
        )
        (loss / (batch["labels"] != -100).sum()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    @staticmethod
    def hidden_grad(partial, group):
        return partial


EXPECT = dict(
    right=[
        r"\btp\b|tensor.?parallel",
        r"(not|never|n't|no|missing|without|lacks?|un)[ -]?.{0,50}(reduc|summed|sum\b|added|combin)|partial|"
        r"own (part|share|shard|slice|contribution)|differ\w*",
    ],
    place=[r"embed", r"blocks", r"\bnorm\b|norm\.weight", r"hidden|head"],
    wrong=[
        r"head\.weight\S* (is|are|has|have|was|were) (a )?(wrong|missing|partial)",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"mean of (the )?(rank |ranks' )?means",
        r"(not|never) (all.?)?(reduced|summed) (over|across) (the )?(dp|data)",
    ],
)
WHY = (
    "The gradient of the hidden states is the part that comes from the rank's own vocabulary rows and is not summed over tp, so "
    "everything below the head (embed, both blocks, norm) "
    "holds a partial gradient that differs between the three tp ranks and sums to the right one. The loss and head.weight are right."
)
