"""A mixture-of-depths language model, data parallel on three ranks with 3, 2 and 2 of seven rows; gradients are summed by hand. In the middle block a router picks four of the seven tokens of each row;
these attend to each other under a causal mask and go through the MLP, are scaled by the router's score and added back at their places.

The bug: the places that torch.topk picks are not sorted, so that the chosen tokens stand in the order of their scores when the causal mask is laid over them. After the public reimplementations of
Mixture-of-Depths, where "sort the selected indices to keep the causal order" was a later fix, and the class of top-k gathers that lose the order.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
WORDS, WIDTH, HEADS, LENGTH, CAPACITY, ROWS = 11, 8, 2, 7, 4, 7


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))

    def forward(self, x):
        """What is to be added to x."""
        y = self.attention(self.norm1(x))
        return y + self.mlp(self.norm2(x + y))


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 1)
        self.block = Block()
        self.keep_order = True

    def places(self, scores):
        places = scores.topk(CAPACITY, dim=1).indices
        return places.sort(dim=1).values if self.keep_order else places

    def forward(self, x):
        scores = self.router(x).squeeze(-1)
        places = self.places(scores)
        index = places[..., None].expand(-1, -1, WIDTH)
        added = self.block(x.gather(1, index))
        added = added * torch.sigmoid(scores.gather(1, places))[..., None]
        return x.scatter_add(1, index, added)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.first, self.routed, self.last = Block(), Routed(), Block()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        x = x + self.first(x)
        x = self.routed(x)
        x = x + self.last(x)
        return self.head(self.norm(x))


class Clean:
    keep_order = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"]).flatten(0, 1)
        return F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum"), rows[
            "labels"
        ].numel()

    def distribute(self, model, ctx):
        model.routed.keep_order = self.keep_order
        return model

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / batch["labels"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    keep_order = False


EXPECT = dict(
    right=[
        r"order|sort|permut|position|place|index|indices|mask|causal|tokens?|rows|input",
        r"forward|attention|routed|block|router|gather|top.?k",
    ],
    place=[r"routed", r"places", r"attention", r"top.?k", r"gather"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"backward formula|no gradient (through|into) the router|router .{0,20}detached",
        r"\bfirst\.attention .{0,20}is wrong|(words|places)\.weight .{0,20}(differs|is wrong) in the forward",
    ],
)
WHY = (
    "Routed.places returns topk's places unsorted on all three ranks, so x.gather hands the four chosen tokens to routed.block in the order of falling score. norm1, and the projections, are only permuted; "
    "the causal mask in routed.block.attention then lets a token see those with higher scores, not those before it: the attention's output differs at most of the chosen tokens, in every row whose order of "
    "scores is not the order of places. The set of chosen tokens, their scores, the places they are added back to, the blocks before it, the sum over dp and the divisor 49 are right. All gradients are "
    "wrong. Fix: sort the places."
)
