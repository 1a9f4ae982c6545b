"""A bidirectional encoder with linear attention, its sequence cut over three ranks inside DistributedDataParallel. After pytorch issues on
broadcast_buffers (DDP sends rank 0's buffers to all, also those that are meant to differ) and FAULTS C19 (shard-local index): the
positions of the rank's own tokens are kept in a buffer.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH = 5, 12, 11, 8


class Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class LinearAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, total):
        y = self.norm(x)
        q, k, v = F.softplus(self.q(y)), F.softplus(self.k(y)), self.v(y)
        state = total(torch.cat([k.mT @ v, k.sum(1)[..., None]], dim=2))
        y = (q @ state[..., :-1]) / (q @ state[..., -1:])
        return x + self.out(y)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(LinearAttention() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.register_buffer("where", torch.arange(LENGTH), persistent=False)

    def forward(self, tokens, total=lambda x: x):
        x = self.embed(tokens) + self.position(self.where)
        for layer in self.layers:
            x = layer(x, total)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Encoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH), generator=g)
        hidden = torch.rand(ROWS, LENGTH, generator=g) < 0.4
        return {
            "tokens": tokens.masked_fill(hidden, 0),
            "labels": tokens.masked_fill(~hidden, -100),
        }

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.token_loss(model(rows["tokens"]), rows["labels"]), (
            rows["labels"] != -100
        ).sum()

    def wrap(self, model):
        return DistributedDataParallel(model, broadcast_buffers=False)

    def distribute(self, model, ctx):
        model.where = model.where.chunk(ctx.world_size)[ctx.rank].clone()
        return self.wrap(model)

    def step(self, model, batch, ctx):
        mine = {k: v.chunk(ctx.world_size, dim=1)[ctx.rank] for k, v in batch.items()}
        count = (mine["labels"] != -100).sum()
        dist.all_reduce(count)
        loss = self.token_loss(model(mine["tokens"], Total.apply), mine["labels"])
        (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    def wrap(self, model):
        return DistributedDataParallel(model)


EXPECT = dict(
    right=[
        r"position|where|buffer|embed",
        r"forward|output|activation|input of|offset|shard|rank|values?|rows? \W?\d|zero|missing|buffer|same",
    ],
    place=[r"position", r"where", r"ranks? \W?[12]"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (right|exact|correct)$",
        r"detach|no_grad",
        r"first wrong .{0,30}layers",
    ],
)
WHY = (
    "DDP broadcasts rank 0's buffers, so ranks 1 and 2 look up the positions 0-3 for their tokens 4-7 and 8-11: their forward is "
    "wrong from the position embedding on (and through the attention also rank 0's). All gradients are wrong; position rows 4-11 get "
    "zero."
)
