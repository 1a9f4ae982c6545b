"""Implicit-feedback matrix factorisation (iALS++ loss by gradient descent): every (user, item) pair that was not seen pays w0 * (u.v)^2, which is computed for all items at once as u^T G u with the Gram
matrix G = V^T V. The item table is cut by rows over three ranks (5, 4 and 4 of 13 items), the users' tower and the item projection are whole on each. Each rank scores the positives whose item it
owns, for all rows, and the Gram term for its own rows; G is the sum of the shards' Gram matrices. Two micro-batches; the whole parameters' gradients are summed over the ranks at the end.

The bug: the hand-written autograd function for the sharded Gram matrix returns V g in its backward, where it has to return V (g + g^T). After reports about hand-written gradients of X^T X (style losses,
ALS and covariance regularisers) that come out half as large.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"shard": 3}}}}
USERS, ITEMS, WIDTH, POSITIVES, ROWS = 9, 13, 6, 3, 8
UNSEEN = 0.3


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH)
        self.user_map = nn.Linear(WIDTH, WIDTH)
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.item_map = nn.Linear(WIDTH, WIDTH)

    def user_vectors(self, ids):
        return torch.tanh(self.user_map(self.users(ids)))

    def item_vectors(self):
        return torch.tanh(self.item_map(self.items.weight))


def seen_terms(scores, weight):
    return weight * (1 - scores).square() - UNSEEN * scores.square()


class ShardedGram(torch.autograd.Function):
    """V^T V over all shards; the shards' losses are summed, so the gradient of G is summed, too."""

    @staticmethod
    def forward(fctx, vectors, group):
        fctx.save_for_backward(vectors)
        fctx.group = group
        gram = vectors.t() @ vectors
        dist.all_reduce(gram, group=group)
        return gram

    @staticmethod
    def backward(fctx, grad):
        (vectors,) = fctx.saved_tensors
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return vectors @ (grad + grad.t()), None


class QuickGram(ShardedGram):
    @staticmethod
    def backward(fctx, grad):
        (vectors,) = fctx.saved_tensors
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return vectors @ grad, None


class Clean:
    gram = ShardedGram

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Factors()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "user": torch.randint(USERS, (ROWS,), generator=g),
            "items": torch.stack(
                [torch.randperm(ITEMS, generator=g)[:POSITIVES] for _ in range(ROWS)]
            ),
            "weight": 1 + torch.rand(ROWS, POSITIVES, generator=g),
        }

    def loss_sum(self, model, rows):
        u, v = model.user_vectors(rows["user"]), model.item_vectors()
        scores = (u[:, None] * v[rows["items"]]).sum(-1)
        every = (u @ (v.t() @ v) * u).sum()
        return seen_terms(scores, rows["weight"]).sum() + UNSEEN * every, len(u)

    @staticmethod
    def bounds(ctx):
        parts = torch.arange(ITEMS).tensor_split(ctx.world_size)[ctx.rank]
        return int(parts[0]), int(parts[-1]) + 1

    def distribute(self, model, ctx):
        lo, hi = self.bounds(ctx)
        model.items.weight = nn.Parameter(model.items.weight.detach()[lo:hi].clone())
        return model

    def owned_positives(self, u, v, part, lo, hi):
        row, place = ((part["items"] >= lo) & (part["items"] < hi)).nonzero(as_tuple=True)
        scores = (u[row] * v[part["items"][row, place] - lo]).sum(-1)
        return seen_terms(scores, part["weight"][row, place]).sum()

    def unseen(self, u, v, ctx):
        gram = self.gram.apply(v, ctx.group("shard"))
        own = u.tensor_split(ctx.world_size)[ctx.rank]
        return UNSEEN * (own @ gram * own).sum()

    def step(self, model, batch, ctx):
        lo, hi = self.bounds(ctx)
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: x.tensor_split(2)[n] for k, x in batch.items()}
            u, v = model.user_vectors(part["user"]), model.item_vectors()
            loss = self.owned_positives(u, v, part, lo, hi) + self.unseen(u, v, ctx)
            (loss / ROWS).backward()
        for name, p in model.named_parameters():
            if name != "items.weight":
                dist.all_reduce(p.grad, group=ctx.group("shard"))


class Buggy(Clean):
    gram = QuickGram


EXPECT = dict(
    right=[
        r"gram|v\^?t ?@? ?v|vectors @ grad|unseen",
        r"half|transpos|\bt\(\)|\^t|both (sides|factors|uses|operands)|one (side|factor|of the two)|0\.5|factor (of )?(2|two)|symmetr|second (use|operand|factor)|backward (formula|function|method|of|is|returns|does|computes)|custom|autograd function",
    ],
    place=[r"QuickGram", r"ShardedGram", r"\bgram\b", r"vectors @ grad", r"unseen"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|missing (all.?)?reduc",
        r"wrong group|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"(user_map|users|user_vectors) .{0,30}(wrong|differs)|forward .{0,30}is wrong|(wrong|other) rows",
        r"divisor|mean of means",
    ],
)
WHY = (
    "QuickGram.backward returns vectors @ grad; the derivative of V^T V in direction g is V (g + g^T), and as the gradient of G is symmetric here (a sum of u u^T), what is handed back is half of what it "
    "should be. Forward and loss are right on all ranks, G is right, its gradient is rightly summed over the three shards. So the part of the gradient of items.weight and item_map that comes through the Gram "
    "matrix is half as large on all ranks and in both micro-batches, the part through the positives' scores is right; users and user_map are right. Fix: return vectors @ (grad + grad.t())."
)
