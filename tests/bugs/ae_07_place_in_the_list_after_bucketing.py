"""Click prediction with one large table of items whose rows are sharded over three ranks, and a position-weighted feature processor as in torchrec (FeatureProcessedEmbeddingBagCollection, PositionWeightedModule): the l-th item of a user's
history is weighted with a trained weight of place l before the bag is summed. Every rank also has users of its own (3, 2 and 2, then 1, 2 and 3); per micro-batch each rank pools, for the users of all ranks, the items that lie in its shard, the
partial bags are summed over the ranks and every rank takes its own users.

The bug: the places are counted after the ids are bucketed by shard. What a rank then has of a history is a shorter list, and its l-th item is not the l-th item of the history. After meta-pytorch/torchrec PRs #3281, #3406, #3606 (row based
sharding for feature processors: "the accessed feature processor weights were incorrect", places calculated after the input split) and #825; fbgemm's block_bucketize_sparse_features has `bucketize_pos` for it.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

TOPOLOGY = {"pools": {"rec": {"axes": {"mp": 3}}}}
ITEMS, PLACES, WIDTH, DENSE = 23, 6, 4, 3
PARTS = [[(0, 3), (3, 4)], [(4, 6), (6, 8)], [(8, 10), (10, 13)]]


class SumPartialBags(torch.autograd.Function):
    """Sums the partial bags (users of all ranks) over the ranks and takes the own users'; backward: own gradients to all."""

    @staticmethod
    def forward(ctx, partial, start, end, group):
        ctx.where, ctx.shape, ctx.group = (start, end), partial.shape, group
        total = partial.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total[start:end].clone()

    @staticmethod
    def backward(ctx, grad):
        total = grad.new_zeros(ctx.shape)
        total[slice(*ctx.where)] = grad
        dist.all_reduce(total, group=ctx.group)
        return total, None, None, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Parameter(torch.randn(ITEMS, WIDTH))
        self.place = nn.Parameter(1 + 0.4 * torch.randn(PLACES))
        self.tower = nn.Sequential(nn.Linear(WIDTH + DENSE, 8), nn.Tanh(), nn.Linear(8, 1))

    def click(self, bag, dense):
        return self.tower(torch.cat([bag, dense], 1)).squeeze(1)


class Clean:
    place_in_the_bucket = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        length = torch.randint(2, PLACES + 1, (rows,), generator=g)
        history = torch.randint(ITEMS, (rows, PLACES), generator=g)
        return {
            "history": history.masked_fill(torch.arange(PLACES)[None] >= length[:, None], -1),
            "dense": torch.randn(rows, DENSE, generator=g),
            "click": torch.randint(2, (rows,), generator=g).float(),
        }

    def loss_sum(self, model, rows):
        there = rows["history"] >= 0
        vectors = model.items[rows["history"].clamp(min=0)] * (model.place * there)[..., None]
        score = model.click(vectors.sum(1), rows["dense"])
        return F.binary_cross_entropy_with_logits(
            score, rows["click"].to(score.dtype), reduction="sum"
        ), len(score)

    def distribute(self, model, ctx):
        model.items = nn.Parameter(distribute_tensor(model.items.detach(), ctx.mesh, [Shard(0)]))
        return model

    def pool(self, model, history, low, high):
        own = (history >= low) & (history < high)
        place = torch.arange(PLACES).expand_as(history)
        if self.place_in_the_bucket:
            place = (own.long().cumsum(1) - 1).clamp(min=0)
        vectors = model.items.to_local()[(history - low).clamp(0, high - low - 1)]
        return (vectors * (model.place[place] * own)[..., None]).sum(1)

    def step(self, model, batch, ctx):
        group = ctx.group("mp")
        per = -(-ITEMS // ctx.world_size)
        low = per * ctx.rank
        high = min(low + per, ITEMS)
        for turn in range(len(PARTS[0])):
            spans = [parts[turn] for parts in PARTS]
            history = torch.cat([batch["history"][a:b] for a, b in spans])
            sizes = [b - a for a, b in spans]
            start = sum(sizes[: ctx.rank])
            bag = SumPartialBags.apply(
                self.pool(model, history, low, high), start, start + sizes[ctx.rank], group
            )
            mine = slice(*spans[ctx.rank])
            score = model.click(bag, batch["dense"][mine])
            loss = F.binary_cross_entropy_with_logits(
                score, batch["click"][mine].to(score.dtype), reduction="sum"
            )
            (loss / len(batch["click"])).backward()
        for p in [model.place, *model.tower.parameters()]:
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    place_in_the_bucket = True


EXPECT = dict(
    right=[
        r"(?i)place|position|items|bag|pool|table|history",
        r"(?i)forward|wrong (place|position|weight|bag|value|input|activation|element|row)|place|position|index|shard|order",
    ],
    place=[r"(?i)\bplace\b|position|items|bag|pool|partial|tower|all.?reduce"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted twice|missing (reduction|all.?reduce)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward is right|wrong only in the backward|(adjoint|backward) of the (collective|all.?reduce).{0,30}wrong",
        r"(?i)(wrong|other|foreign) items? (is|are) (looked up|read)|off.by.one|row offset|ids? .{0,20}(without|missing) offset",
        r"(?i)labels? (is|are) wrong|rows? .{0,20}(never read|read twice|dropped)|micro.?batch.{0,20}(lost|dropped|overwritten)",
        r"(?i)only (on )?rank [012]\b",
    ],
)
WHY = (
    "Each rank looks up the right rows of its shard of `items` (rows 0-7, 8-15, 16-22) for the users of all ranks, but weights the k-th item that it owns of a history with place[k] instead of place[the item's place in the history]. So items that "
    "come after an item of another shard get the weight of too early a place; only those with no foreign item before them are right. The partial bags are wrong on all three ranks, in both micro-batches, and so is their sum; the forward goes wrong "
    "there, before the tower. place.grad is wrong in direction (too much on the early places, little or nothing on the last), items.grad is wrong on all shards (each item's gradient has the wrong place weight), and the tower's gradients follow from wrong bags. Ids, shards, "
    "dense features, labels, the divisor 13, the all-reduce and its adjoint are right. Fix: compute the place before the ids are bucketed and send it along with them."
)
