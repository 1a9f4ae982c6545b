"""Causal ring attention over a context-parallel group of three, written as an autograd.Function: keys and values go around the ring in the
forward, and with them the accumulators of their gradients in the backward. After reports on hand-written ring attention: the accumulators
stop one hop before home.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH, HEADS, DIM = 4, 12, 19, 12, 2, 5


def turn(tensors, group):
    """Every tensor goes to the next rank of the ring, the previous one's comes."""
    n, me = dist.get_world_size(group), dist.get_rank(group)
    to = dist.get_global_rank(group, (me + 1) % n)
    of = dist.get_global_rank(group, (me - 1) % n)
    got, ops = [], []
    for t in tensors:
        t = t.contiguous()
        got.append(torch.empty_like(t))
        ops += [dist.P2POp(dist.isend, t, to, group), dist.P2POp(dist.irecv, got[-1], of, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got


def scores(q, k, me, owner):
    s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    at_q = me * q.shape[2] + torch.arange(q.shape[2])
    at_k = owner * k.shape[2] + torch.arange(k.shape[2])
    return s.masked_fill(at_k[None] > at_q[:, None], float("-inf"))


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, group, all_the_way):
        n, me = dist.get_world_size(group), dist.get_rank(group)
        out, lse = torch.zeros_like(q), torch.full_like(q[..., :1], float("-inf"))
        ak, av = k, v
        for i in range(n):
            owner = (me - i) % n
            if owner <= me:
                s = scores(q, ak, me, owner)
                new = torch.logaddexp(lse, s.logsumexp(-1, keepdim=True))
                out = out * (lse - new).exp() + (s - new).exp() @ av
                lse = new
            if i < n - 1:
                ak, av = turn((ak, av), group)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = group, all_the_way
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        group, all_the_way = ctx.rest
        n, me = dist.get_world_size(group), dist.get_rank(group)
        delta = (grad * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for i in range(n):
            owner = (me - i) % n
            if owner <= me:
                p = (scores(q, k, me, owner) - lse).exp()
                ds = p * (grad @ v.transpose(-1, -2) - delta) / q.shape[-1] ** 0.5
                dq = dq + ds @ k
                dk = dk + ds.transpose(-1, -2) @ q
                dv = dv + p.transpose(-1, -2) @ grad
            if i < n - 1:
                k, v, dk, dv = turn((k, v, dk, dv), group)
            elif all_the_way:
                dk, dv = turn((dk, dv), group)
        return dq, dk, dv, None, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * DIM, bias=False) for _ in range(3))
        self.o = nn.Linear(HEADS * DIM, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 18), nn.SiLU(), nn.Linear(18, WIDTH))

    def forward(self, x, attend):
        h = self.norm(x)
        q, k, v = (
            f(h).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        x = x + self.o(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, places, attend):
        x = self.embed(ids) + self.place(places)
        for block in self.blocks:
            x = block(x, attend)
        return self.head(x)


def whole(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def token_loss(logits, labels):
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


class Clean:
    all_the_way = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return LM()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        labels = ids[:, 1:].clone()
        for row, prompt in enumerate((3, 0, 6, 1)):
            labels[row, :prompt] = -100
        return {"ids": ids[:, :-1], "labels": labels}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], torch.arange(LENGTH), whole)
        return token_loss(logits, rows["labels"]), (rows["labels"] >= 0).sum()

    def step(self, model, batch, ctx):
        n, me, group = ctx.axes["cp"], ctx.coords["cp"], ctx.group("cp")
        count = (batch["labels"] >= 0).sum()
        own = torch.arange(LENGTH).chunk(n)[me]

        def attend(q, k, v):
            return Ring.apply(q, k, v, group, self.all_the_way)

        for rows in torch.arange(len(batch["ids"])).tensor_split(3):
            ids, labels = (batch[name][rows][:, own] for name in ("ids", "labels"))
            (token_loss(model(ids, own, attend), labels) / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    all_the_way = False


EXPECT = dict(
    right=[
        r"backward|gradient that reaches|adjoint",
        r"blocks\.\d\.(k|v)\b|keys?\b|values?\b|attention|attend|ring",
    ],
    place=[r"blocks\.\d|\b(k|v)\b|attend|ring"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced",
        r"forward .{0,40}(goes|is) wrong in",
        r"(own|local) (count|denominator|divisor)",
        r"gradient that reaches \S*\.q\b\S* .{0,20}wrong in blocks\.1",
        r"rows .{0,20}(twice|never)",
    ],
)
WHY = (
    "In the backward of the ring the accumulators of the keys' and values' gradients are turned with the keys only n-1 times, so the rank that "
    "returns them is not the owner: rank r returns the gradients of the keys and values of rank r+1 (mod 3). The forward and the gradients of q are "
    "right in the last block; the gradients that reach blocks.1.k and blocks.1.v belong to other positions, and from there blocks.1.k, "
    "blocks.1.v, blocks.1.norm, all of blocks.0 and the embeddings are wrong on all ranks; head and blocks.1.o/mlp/q are right."
)
