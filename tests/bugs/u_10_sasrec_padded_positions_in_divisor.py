"""A sequential recommender (SASRec with a full softmax over tied item embeddings): histories of unlike length, each rank's cut to its own longest; next-item loss
over the real positions. DDP of four with a hook that sums, divided by the positions of all ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
LENGTHS = [5, 3, 9, 4, 7, 8, 2, 6, 3]
ROWS, LONGEST, ITEMS, WIDTH = len(LENGTHS), max(LENGTHS), 23, 10


def sum_hook(_, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class SASRec(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH, padding_idx=0)
        self.places = nn.Embedding(LONGEST, WIDTH)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, history):
        h = self.items(history) + self.places.weight[: history.shape[1]]
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        h = h + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        h = self.last(h + self.mlp(h))
        return h @ self.items.weight.T


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return SASRec()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        seen = torch.randint(1, ITEMS, (ROWS, LONGEST + 1), generator=g)
        mask = torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]
        return {"history": seen[:, :-1] * mask, "target": seen[:, 1:] * mask}

    def loss_sum(self, model, rows):
        scores, target = model(rows["history"]), rows["target"]
        loss = F.cross_entropy(
            scores.flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum"
        )
        return loss, (target != 0).sum()

    def distribute(self, model, ctx):
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, sum_hook)
        return model

    def positions(self, target):
        return (target != 0).sum()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        longest = int((mine["target"] != 0).sum(1).max())
        mine = {k: v[:, :longest] for k, v in mine.items()}
        loss, _ = self.loss_sum(model, mine)
        count = self.positions(mine["target"])
        dist.all_reduce(count)
        (loss / count).backward()


class Buggy(Clean):
    def positions(self, target):
        return torch.tensor(target.numel())


EXPECT = dict(
    right=[
        r"factor|times|divi|count|denominator|normalis|too small",
        r"padd|mask|positions|\b69\b|47/69|0\.6811|denominator|divi|normalis|count",
    ],
    place=[
        r"loss|denominator|divi|count|normalis|cross_entropy|backward|every parameter|all (gradients|parameters)"
    ],
    wrong=[
        r"(averages?|mean) (where|instead of)|already multiplied by 0\.25|1/4",
        r"(own|local) (count|denominator|divisor|positions)",
        r"(never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"(counted|reduced|summed|added) (twice|again)",
        r"forward (is wrong|goes wrong)|goes wrong in the forward",
        r"rows? .{0,20}(never read|read twice)|gradient of other targets|tokens? (is|are) lost",
    ],
)
WHY = (
    "The loss leaves padding out, but the divisor counts it: target.numel() of each rank's cut batch, 27, 14, 16 and 12, is 69 over all ranks, where 47 positions are real. So every gradient on every rank is "
    "47/69 = 0.681 of what it should be, all parameters alike. Forward, the sum of losses, the reduction (a sum) and its group are right; the divisor is global, but of the wrong thing."
)
