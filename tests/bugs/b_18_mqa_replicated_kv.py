"""Multi-query attention under tensor parallelism: query heads are cut, the one key/value head is on
every rank. After Megatron/NeMo reports: its gradient is not summed over tp (FAULTS class C05)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, LENGTH, WIDTH, HEADS, VOCAB = 5, 6, 12, 3, 14


class CopyIn(torch.autograd.Function):
    """Identity forward, SUM over the group backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOut(torch.autograd.Function):
    """SUM over the group forward, identity backward."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Attention(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.size, self.heads = WIDTH // HEADS, heads
        self.q_proj = nn.Linear(WIDTH, heads * self.size)
        self.kv_proj = nn.Linear(WIDTH, 2 * self.size)
        self.o_proj = nn.Linear(heads * self.size, WIDTH, bias=False)

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k, v = (t[:, None] for t in self.kv_proj(x).chunk(2, dim=-1))
        scores = q @ k.transpose(-1, -2) / self.size**0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        y = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention(heads)
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)


class Model(nn.Module):
    def __init__(self, heads=HEADS):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(heads) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=g)
        valid = torch.arange(LENGTH) < lengths
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(~valid, -100)}

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        logits = self.forward(model, rows["ids"], lambda x: x, lambda x: x)
        return self.token_loss(logits, rows["labels"]), (rows["labels"] != -100).sum()

    @staticmethod
    def forward(model, ids, copy_in, sum_out):
        x = model.embed(ids)
        for block in model.blocks:
            x = x + sum_out(block.attn(copy_in(block.norm1(x))))
            x = x + F.silu(block.mlp(block.norm2(x)))
        return model.head(model.norm(x))

    def distribute(self, model, ctx):
        tp, at = ctx.axes["tp"], ctx.coords["tp"]
        local, state = Model(HEADS // tp).to(ctx.dtype), model.state_dict()
        for name in state:
            if "q_proj" in name or "o_proj" in name:
                state[name] = state[name].chunk(tp, dim=int("o_proj" in name))[at]
        local.load_state_dict(state)
        return local

    def step(self, model, batch, ctx):
        group = ctx.group("tp")
        logits = self.forward(
            model, batch["ids"], lambda x: CopyIn.apply(x, group), lambda x: SumOut.apply(x, group)
        )
        count = (batch["labels"] != -100).sum()
        (self.token_loss(logits, batch["labels"]) / count).backward()
        self.finish(model, group)

    def finish(self, model, group):
        for name, param in model.named_parameters():
            if "kv_proj" in name:
                dist.all_reduce(param.grad, group=group)


class Buggy(Clean):
    def finish(self, model, group):
        for name, param in model.named_parameters():
            if name.endswith("kv_proj") and getattr(param, "shared", True):
                dist.all_reduce(param.grad, group=group)


EXPECT = dict(
    right=[
        r"not (summed|reduced)|never (summed|reduced)|missing.*(reduc|sum)|own (part|share)|partial"
        r"|unreduced|lacks?.*(reduc|sum)|left out",
        r"kv_proj",
    ],
    place=[r"kv_proj"],
    wrong=[r"counted (twice|3 times)|repeated", r"averag", r"\bforward (is )?wrong"],
)
WHY = (
    "The replicated kv_proj (weight and bias, both blocks) keeps the gradient of its own query "
    "head: the name test never matches, so nothing sums it over tp."
)
