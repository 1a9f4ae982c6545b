"""Two-tower retrieval on three ranks with 4, 3 and 5 pairs of user and item. The items of all ranks are gathered (differentiable, padded to the largest number) and every user chooses the own item among all of them. An item that is the
user's own one but came with another pair (an accidental hit) is no negative and is left out of the softmax. The divisor is the number of pairs of all ranks.

The bug: the item numbers are not gathered, only the vectors. Accidental hits are left out among the own rank's pairs alone; the same item from another rank stays a negative. After tensorflow/recommenders issues 631 and 334
(remove_accidental_hits needs the candidates' ids) and FlagOpen/FlagEmbedding issue 37 (negatives_cross_device brings the own positive back from other devices).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
USERS, ITEMS, WIDTH = 9, 8, 6
USER = [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 2, 5]
ITEM = [3, 1, 3, 6, 5, 3, 7, 0, 6, 0, 2, 1]
SIZES = [4, 3, 5]


class Gather(torch.autograd.Function):
    """The rows of all ranks; backward: the sum of all ranks' gradients for the own rows."""

    @staticmethod
    def forward(ctx, x, rank, group):
        ctx.rank, ctx.group = rank, group
        full = x.new_zeros(max(SIZES), x.shape[1])
        full[: len(x)] = x
        parts = [torch.empty_like(full) for _ in SIZES]
        dist.all_gather(parts, full, group=group)
        return torch.cat([part[:n] for part, n in zip(parts, SIZES, strict=True)])

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.split(SIZES)[ctx.rank], None, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, WIDTH), nn.Embedding(ITEMS, WIDTH)
        self.user_tower = nn.Sequential(nn.Linear(WIDTH, 8), nn.SiLU(), nn.Linear(8, WIDTH))
        self.item_tower = nn.Sequential(nn.Linear(WIDTH, 8), nn.SiLU(), nn.Linear(8, WIDTH))

    def forward(self, user, item):
        return self.user_tower(self.users(user)), self.item_tower(self.items(item))


def choice_loss(user, candidates, own, hit):
    scores = user @ candidates.T
    return F.cross_entropy(scores.masked_fill(hit, float("-inf")), own, reduction="sum")


class Clean:
    everywhere = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        return {"user": torch.tensor(USER), "item": torch.tensor(ITEM)}

    def loss_sum(self, model, rows):
        user, item = model(rows["user"], rows["item"])
        own = torch.arange(len(user))
        hit = rows["item"][:, None] == rows["item"][None]
        hit[own, own] = False
        return choice_loss(user, item, own, hit), len(user)

    def step(self, model, batch, ctx):
        first = sum(SIZES[: ctx.rank])
        mine = slice(first, first + SIZES[ctx.rank])
        user, item = model(batch["user"][mine], batch["item"][mine])
        candidates = Gather.apply(item, ctx.rank, ctx.group("dp"))
        ids = batch["item"]
        own = first + torch.arange(len(user))
        hit = ids[mine][:, None] == ids[None]
        if not self.everywhere:
            hit[:, :first] = False
            hit[:, mine.stop :] = False
        hit[torch.arange(len(user)), own] = False
        (choice_loss(user, candidates, own, hit) / len(ids)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    everywhere = False


EXPECT = dict(
    right=[
        r"(?i)mask|negativ|candidate|hit|softmax|score|logit|column|loss|cross_entropy",
        r"(?i)mask|hit|exclud|left out|fill|column|same item|negativ|inf\b",
        r"(?i)(rank|own|other|gather|row|not|more|another|fewer|less|missing|wrong|differ)",
    ],
    place=[r"(?i)mask|hit|loss|candidate|score|softmax|cross_entropy|negativ"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)(Gather|all.?gather) .{0,40}(backward (is )?wrong|without gradient|wrong adjoint"
        r"|own slice)",
        r"(?i)towers? .{0,30}forward .{0,20}wrong|forward of (user_tower|item_tower) is wrong",
        r"(?i)own (item|target|label|number)s? .{0,30}(wrong|offset|without the first)",
        r"(?i)only (on )?rank [01]\b|temperature",
    ],
)
WHY = (
    "Item 3 is in rows 0 and 2 (rank 0) and 5 (rank 1), item 1 in rows 1 (rank 0) and 11 (rank 2), item 6 in rows 3 (rank 0) and 8 (rank 2), item 0 in rows 7 and 9 (both rank 2). Between ranks these stay negatives: user of row 0 "
    "against candidate 5, row 2 against 5, row 5 against 0 and 2, row 1 against 11, row 11 against 1, row 3 against 8, row 8 against 3. "
    "Pairs 0-2 and 7-9, inside one rank, are left out rightly. So the loss and the softmax of rows 0, 1, 2, 3, 5, 8, 11 are wrong (the mask of scores, before cross_entropy), on all three ranks, rows 4, 6, 7, 9, 10 are right. Both "
    "towers' forward, the gather with its summing backward, targets, "
    "divisor 12 and reduction are right. All parameters get wrong gradients, equal on all ranks. Fix: gather the item numbers too and mask over all candidates."
)
