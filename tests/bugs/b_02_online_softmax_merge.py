"""Ring attention that merges its blocks with a running maximum and denominator (online softmax).
After reports on wrong log-sum-exp merges in ring attention implementations."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "cp": 2}}}}
ROWS, LENGTH, WIDTH, HEADS, VOCAB = 6, 8, 12, 2, 15


def shift(x, group, by):
    """Pass x on along the ring; what the rank on the other side passed comes back."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    to = dist.get_global_rank(group, (rank + by) % size)
    source = dist.get_global_rank(group, (rank - by) % size)
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    works = [dist.isend(x, to, group=group), dist.irecv(out, source, group=group)]
    for work in works:
        work.wait()
    return out


class Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return shift(x, group, 1)

    @staticmethod
    def backward(ctx, grad):
        return shift(grad, ctx.group, -1), None


class Attention(nn.Module):
    rescale = True

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, group=None):
        q, k, v = (
            proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        at, kv = torch.arange(x.shape[1]), torch.stack([k, v])
        largest = None
        for step in range(size):
            origin = (rank - step) % size
            hidden = origin * len(at) + at > rank * len(at) + at[:, None]
            scores = 3 * q @ kv[0].transpose(-1, -2) / q.shape[-1] ** 0.5
            scores = scores.masked_fill(hidden, float("-inf"))
            top = scores.detach().amax(-1, keepdim=True)
            if largest is None:
                largest = top
                weight = (scores - top).exp()
                out, total = weight @ kv[1], weight.sum(-1, keepdim=True)
            else:
                new = torch.maximum(largest, top)
                weight, old = (scores - new).exp(), (largest - new).exp()
                out = (out * old if self.rescale else out) + weight @ kv[1]
                total = total * old + weight.sum(-1, keepdim=True)
                largest = new
            if step + 1 < size:
                kv = Shift.apply(kv, group)
        return self.o_proj((out / total).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.RMSNorm(WIDTH), Attention()

    def forward(self, x, group=None):
        return x + self.attn(self.norm(x), group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, start=0, group=None):
        x = self.embed(ids) + self.position(start + torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x, group)
        return self.head(self.norm(x))


class Clean:
    rescale = True

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
        return self.token_loss(model(rows["ids"]), rows["labels"]), (rows["labels"] != -100).sum()

    def step(self, model, batch, ctx):
        for layer in model.layers:
            layer.attn.rescale = self.rescale
        rows = {k: v.chunk(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        mine = {k: v.chunk(ctx.axes["cp"], dim=1)[ctx.coords["cp"]] for k, v in rows.items()}
        count = (mine["labels"] != -100).sum()
        dist.all_reduce(count)
        start = ctx.coords["cp"] * mine["ids"].shape[1]
        logits = model(mine["ids"], start, ctx.group("cp"))
        (self.token_loss(logits, mine["labels"]) / count).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    rescale = False


EXPECT = dict(
    right=[r"forward|output|activation", r"attn|attention"],
    place=[r"layers\.0\.attn", r"ranks? (1|3)\b", r"cp ?= ?1"],
    wrong=[r"never reduced|not reduced|missing reduction", r"counted twice", r"averag"],
)
WHY = (
    "When a later block raises the running maximum only the denominator is rescaled, not the "
    "accumulated output: attention is wrong where a rank sees more than one block (cp = 1)."
)
