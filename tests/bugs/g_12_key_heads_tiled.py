"""Ulysses sequence parallelism with grouped-query attention: there are fewer key heads than ranks, so they are repeated before the
all-to-all. After reports on GQA under Ulysses (DeepSpeed, verl's `repeat_kv` patch, ms-swift): `repeat` tiles the heads (0 1 0 1) where
`repeat_interleave` (0 0 1 1) fits the groups of the queries.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 4}}}}
ROWS, LENGTH, VOCAB, HEADS, KEY_HEADS, SIZE = 3, 8, 21, 8, 2, 2
WIDTH = HEADS * SIZE


class Exchange(torch.autograd.Function):
    """Cut along one dimension, join along another, between the ranks."""

    @staticmethod
    def forward(ctx, x, cut, join):
        ctx.dims = cut, join
        parts = torch.stack(x.chunk(dist.get_world_size(), cut))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts)
        return torch.cat(list(received), join)

    @staticmethod
    def backward(ctx, grad):
        cut, join = ctx.dims
        return Exchange.apply(grad, join, cut), None, None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, KEY_HEADS * SIZE), nn.Linear(WIDTH, KEY_HEADS * SIZE)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, whole, back, repeat):
        h = self.norm(x)
        q = whole(self.q(h).unflatten(-1, (HEADS, SIZE)))
        k, v = (whole(repeat(f(h).unflatten(-1, (KEY_HEADS, SIZE)))) for f in (self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(back(y.transpose(1, 2)).flatten(2))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, places, whole=lambda t: t, back=lambda t: t, repeat=lambda t: t):
        x = self.tokens(ids) + self.places(places)
        for layer in self.layers:
            x = layer(x, whole, back, repeat)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        prompt, end = torch.tensor([[2], [0], [4]]), torch.tensor([[8], [5], [7]])
        places = torch.arange(LENGTH)
        answer = (places >= prompt) & (places < end)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(~answer, -100)}

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], torch.arange(LENGTH))
        return self.token_loss(logits, rows["labels"]), (rows["labels"] != -100).sum()

    def repeat(self, heads):
        return heads.repeat_interleave(dist.get_world_size() // KEY_HEADS, 2)

    def step(self, model, batch, ctx):
        mine = {k: v.chunk(ctx.world_size, 1)[ctx.rank] for k, v in batch.items()}
        places = torch.arange(LENGTH).chunk(ctx.world_size)[ctx.rank]
        logits = model(
            mine["ids"],
            places,
            whole=lambda t: Exchange.apply(t, 2, 1),
            back=lambda t: Exchange.apply(t, 1, 2),
            repeat=self.repeat,
        )
        (self.token_loss(logits, mine["labels"]) / (batch["labels"] != -100).sum()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def repeat(self, heads):
        return heads.repeat(1, 1, dist.get_world_size() // KEY_HEADS, 1)


EXPECT = dict(
    right=[
        r"forward|output|activation|value|heads?|permut|order|input of|layout",
        r"layers\.0|attention|\b(k|v|q|out)\b|key|exchange|all.to.all",
    ],
    place=[r"layers\.0", r"attention", r"(all|every|each) ranks?|ranks? \W?[0-3]"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"forward (pass )?(is|was) (right|exact|correct)$",
        r"(output|forward) of (the )?(tokens|places|layers\.0\.(norm|q|k|v))\S* (is|was) wrong|first wrong .{0,20}(tokens|"
        r"places|layers\.0\.(norm|q|k|v)\b)",
        r"detach|no_grad",
        r"(divided|normali[sz]ed) by (its|the|their) own",
    ],
)
WHY = (
    "Rank r has query heads 2r and 2r+1, which belong to key head r // 2; the tiled order gives it key head r % 2, so the heads of "
    "ranks 1 and 2 attend to the wrong keys and values. After the exchange back every rank's input of layers.0.out is wrong (query "
    "heads 2 to 5), and with it the forward and the gradients of all parameters but k.bias, which softmax makes zero either way."
)
