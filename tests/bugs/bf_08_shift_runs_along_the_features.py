"""A small language model with token shift (every block mixes a token with the one before it) on three ranks that divide the tokens (4, 3 and 2 of 9). A rank's first token gets the last token of the rank before it through an autograd
Function whose backward sends the gradient back; the first rank has none before it and pads with zero. Two micro-batches of odd size, gradients summed over the ranks; divisor: all predicted tokens.

The bug: the first rank pads with (1, -1), and torch's pad counts dimensions from the last: its tokens are shifted along their features instead of along time. The right pad is (0, 0, 1, -1), as in RWKV's ZeroPad2d((0, 0, 1, -1));
after lucidrains/FLASH-pytorch issue 5 (About the shift_tokens) on what this pad does.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
SHARES, VOCABULARY, WIDTH, ROWS = [4, 3, 2], 11, 7, 5
TOKENS = sum(SHARES)
PARTS = [(0, 2), (2, 5)]


class Edge(torch.autograd.Function):
    """x itself, and the last token of the rank before this one."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, rank = group, dist.get_rank(group)
        last = x[:, -1].contiguous()
        every = [torch.empty_like(last) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, last, group=group)
        before = every[rank - 1] if rank else torch.zeros_like(last)
        return x.view_as(x), before[:, None].clone()

    @staticmethod
    def backward(ctx, grad, grad_before):
        rank, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        own = grad_before[:, 0].contiguous()
        every = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(every, own, group=ctx.group)
        grad = grad.clone()
        if rank + 1 < size:
            grad[:, -1] += every[rank + 1]
        return grad, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.group, self.pad = None, (0, 0, 1, -1)
        self.norm = nn.LayerNorm(WIDTH)
        self.share = nn.Parameter(torch.rand(WIDTH))
        self.key, self.gate = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(2 * WIDTH, WIDTH)

    def shift(self, x):
        if self.group is None:
            return x, F.pad(x, (0, 0, 1, -1))
        x, before = Edge.apply(x, self.group)
        if dist.get_rank(self.group) == 0:
            return x, F.pad(x, self.pad)
        return x, torch.cat([before, x[:, :-1]], 1)

    def forward(self, x):
        now, past = self.shift(self.norm(x))
        mixed = now * self.share + past * (1 - self.share)
        return x + torch.sigmoid(self.gate(mixed)) * self.value(F.silu(self.key(mixed)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.words = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.words(x)


def word_loss(model, ids, following):
    return F.cross_entropy(model(ids).flatten(0, 1), following.flatten(), reduction="sum")


class Clean:
    pad = (0, 0, 1, -1)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        text = torch.randint(VOCABULARY, (ROWS, TOKENS + 1), generator=g)
        return {"ids": text[:, :-1].contiguous(), "following": text[:, 1:].contiguous()}

    def loss_sum(self, model, rows):
        return word_loss(model, rows["ids"], rows["following"]), rows["ids"].numel()

    def distribute(self, model, ctx):
        for block in model.blocks:
            block.group, block.pad = ctx.group("cp"), self.pad
        return model

    def step(self, model, batch, ctx):
        model.zero_grad(set_to_none=True)
        first = sum(SHARES[: ctx.rank])
        own = slice(first, first + SHARES[ctx.rank])
        for low, high in PARTS:
            ids, following = batch["ids"][low:high, own], batch["following"][low:high, own]
            (word_loss(model, ids, following) / batch["ids"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("cp"))


class Buggy(Clean):
    pad = (1, -1)


EXPECT = dict(
    right=[
        r"(?i)blocks?\b|shift|norm|pad|gate|key|share",
        r"(?i)rank 0|first rank|first shard|tokens? 0|first 4|places? 0",
        r"(?i)forward|output|value|input|dimension|shift|computes|features",
    ],
    place=[r"(?i)blocks?(\.|\[)?0|shift|blocks?\.0|gate|key"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the (last|first) micro.?batch",
        r"(?i)forward goes wrong (first )?(at|in) (the )?(embed|words)|embed.{0,30}forward.{0,20}wrong",
        r"(?i)forward is right|goes wrong (first |only )?in the backward",
        r"(?i)labels? .{0,20}(is|are) wrong|detach|recomput|dropout",
    ],
)
WHY = (
    "Rank 0 (tokens 0 to 3) pads the normed tokens with (1, -1): the last dimension, so every token's features move by one place and the token before it is not seen. Right is (0, 0, 1, -1): token t gets token t - 1, token 0 zeros. The "
    "forward goes wrong in blocks.0 on rank 0 (what goes into gate and key after the norm, which is right), in all rows and both micro-batches. In blocks.1 the wrong values go on; rank 1 gets a wrong edge token in blocks.1 (the output "
    "of blocks.0 of rank 0), so rank 1's first token is wrong from there, as a consequence; the whole forward of rank 2 and blocks.0 of rank 1 are right. Gradients of all parameters are wrong. Edge exchange and its backward, sum over ranks, "
    "divisor 45 are right. Fix: pad (0, 0, 1, -1)."
)
