"""Click prediction (two embedding tables, users and items, and a small dense part) on three ranks with two micro-batches each. The tables' gradients are exchanged sparsely: each rank packs the rows it touched (their numbers and
gradients), pads to the largest number of any rank, all-gathers both and adds up the rows of all ranks; the dense part is all-reduced. Sum of the losses over the clicks of all ranks, divided by their number.

The bug: what comes from another rank is cut to the number of rows the receiver itself touched, not to the sender's number (sizes[rank] for sizes[source]). Of ranks that touched more rows, the last ones are lost; the padding has
gradient zero and does no harm. After the padded all-gather of sparse gradients in ProcessGroupGloo (pytorch issue 22226, PR 19146), written by hand.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
USERS, ITEMS, HISTORY, WIDTH = 14, 17, 3, 4
PARTS = [[(0, 1), (1, 2)], [(2, 5), (5, 8)], [(8, 10), (10, 12)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, WIDTH), nn.Embedding(ITEMS, WIDTH)
        self.dense = nn.Sequential(nn.Linear(3 * WIDTH, 6), nn.SiLU(), nn.Linear(6, 1))

    def forward(self, user, item, history):
        u, i, h = self.users(user), self.items(item), self.items(history).mean(1)
        return self.dense(torch.cat([u, i * u, h], -1))[:, 0]


def click_loss(model, rows):
    score = model(rows["user"], rows["item"], rows["history"])
    click = rows["click"].to(score.dtype)
    return F.binary_cross_entropy_with_logits(score, click, reduction="sum")


class Clean:
    cut_at_own = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        return {
            "user": torch.randint(USERS, (rows,), generator=g),
            "item": torch.randint(ITEMS, (rows,), generator=g),
            "history": torch.randint(ITEMS, (rows, HISTORY), generator=g),
            "click": torch.randint(2, (rows,), generator=g),
        }

    def loss_sum(self, model, rows):
        return click_loss(model, rows), len(rows["click"])

    def exchange(self, grad, touched, ctx):
        """The sum of the ranks' gradients of a table, from the touched rows of each."""
        group, world = ctx.group("dp"), ctx.world_size
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(world)]
        dist.all_gather(sizes, torch.tensor([len(touched)]), group=group)
        most = max(int(s) for s in sizes)
        numbers = torch.zeros(most, dtype=torch.long)
        values = grad.new_zeros(most, grad.shape[1])
        numbers[: len(touched)], values[: len(touched)] = touched, grad[touched]
        all_numbers = [torch.empty_like(numbers) for _ in range(world)]
        all_values = [torch.empty_like(values) for _ in range(world)]
        dist.all_gather(all_numbers, numbers, group=group)
        dist.all_gather(all_values, values, group=group)
        total = torch.zeros_like(grad)
        for source in range(world):
            size = int(sizes[ctx.rank if self.cut_at_own else source])
            total.index_add_(0, all_numbers[source][:size], all_values[source][:size])
        return total

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for low, high in parts:
            rows = {k: v[low:high] for k, v in batch.items()}
            (click_loss(model, rows) / len(batch["click"])).backward()
        mine = {k: v[parts[0][0] : parts[-1][1]] for k, v in batch.items()}
        users = mine["user"].unique()
        items = torch.cat([mine["item"], mine["history"].flatten()]).unique()
        model.users.weight.grad = self.exchange(model.users.weight.grad, users, ctx)
        model.items.weight.grad = self.exchange(model.items.weight.grad, items, ctx)
        for p in model.dense.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    cut_at_own = True


EXPECT = dict(
    right=[
        r"(?i)users|items|embedding|table",
        r"(?i)reduc|exchang|sum|gather|rank 0|ranks? \[?0|differ",
        r"(?i)miss|lack|lost|lose|not (all|every|the whole)|part|incomplete|some rows|cut|left out|zero|without|other",
    ],
    place=[r"(?i)users|items|embedding|table"],
    wrong=[
        r"(?i)dense[^.;]{0,60} (is|are) (wrong|missing|not reduced)",
        r"(?i)(reduced|summed|counted) (twice|again)|wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward|backward of .{0,30}wrong",
        r"(?i)labels? .{0,20}(is|are) (wrong|of)|wrong (data|input)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never)",
        r"(?i)rank 1 .{0,30}(lacks|misses|is wrong|gets too little)|never reduced|not reduced at all",
    ],
)
WHY = (
    "The local gradients are right on all ranks (forward, backward, both micro-batches, divisor 12), and the dense part's all-reduce too. In the exchange of the tables (users.weight, items.weight) a receiver keeps only as many rows of "
    "every sender as it touched itself. Rank 1 (six clicks) touches most rows and so has everything: its gradients are right. Rank 0 (two clicks) keeps only its own number of rows from ranks 1 and 2 and loses their rows with the "
    "highest numbers; rank 2 (four clicks) loses some of rank 1's. So the table gradients differ between the ranks: rows with small numbers are complete, rows with high numbers lack the contributions of ranks 1 and 2 on rank 0 and of "
    "rank 1 on rank 2. Fix: sizes[source] in place of sizes[ctx.rank]."
)
