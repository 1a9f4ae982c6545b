"""Megatron's fused QKV projection, cut by columns over tp; its rows go head by head (q, k, v each).
After conversion reports (Megatron/NeoX): the cut layer reads all q, then all k, then all v."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 2}}}}
ROWS, LENGTH, WIDTH, HEADS, VOCAB = 5, 5, 12, 4, 13


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
        self.heads, self.size = heads, WIDTH // HEADS
        self.query_key_value = nn.Linear(WIDTH, 3 * heads * self.size)
        self.dense = nn.Linear(heads * self.size, WIDTH, bias=False)

    def forward(self, x, by_head=True):
        x = self.query_key_value(x)
        if by_head:
            q, k, v = x.unflatten(-1, (self.heads, 3, self.size)).unbind(-2)
        else:
            q, k, v = x.unflatten(-1, (3, self.heads, self.size)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dense(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(heads)


class Model(nn.Module):
    def __init__(self, heads=HEADS):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block(heads) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)


class Clean:
    by_head = True

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
        logits = self.forward(model, rows["ids"])
        return self.token_loss(logits, rows["labels"]), (rows["labels"] != -100).sum()

    @staticmethod
    def forward(model, ids, group=None, by_head=True):
        x = model.embed(ids) + model.position(torch.arange(ids.shape[1]))
        for layer in model.layers:
            y = layer.norm(x)
            if group is None:
                x = x + layer.attention(y)
            else:
                y = layer.attention(CopyIn.apply(y, group), by_head)
                x = x + SumOut.apply(y, group)
        return model.head(model.norm(x))

    def distribute(self, model, ctx):
        tp, at = ctx.axes["tp"], ctx.coords["tp"]
        local = Model(HEADS // tp).to(ctx.dtype)
        state = model.state_dict()
        for i in range(2):
            for name, dim in (
                ("query_key_value.weight", 0),
                ("query_key_value.bias", 0),
                ("dense.weight", 1),
            ):
                full = f"layers.{i}.attention.{name}"
                state[full] = state[full].chunk(tp, dim)[at]
        local.load_state_dict(state)
        return local

    def step(self, model, batch, ctx):
        logits = self.forward(model, batch["ids"], ctx.group("tp"), self.by_head)
        count = (batch["labels"] != -100).sum()
        (self.token_loss(logits, batch["labels"]) / count).backward()


class Buggy(Clean):
    by_head = False


EXPECT = dict(
    right=[r"forward|output|activation", r"attention|query_key_value|dense"],
    place=[r"layers\.0\.attention", r"query_key_value"],
    wrong=[r"never reduced|not reduced|missing reduction", r"counted twice", r"averag"],
)
WHY = (
    "On tp the fused projection is split as [all q, all k, all v] though its rows go by head: "
    "the forward is wrong from layers.0.attention on, all ranks."
)
