"""A DLRM-like click model: a sparse user embedding and a sparse EmbeddingBag of items, dense parts beside; sparse gradients are exchanged by
gathering indices and values. After Horovod's and pytorch's reports on sparse gradients: the gathered values are averaged (divided by the
number of ranks) while the dense gradients are summed.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
ROWS, USERS, ITEMS, BAG, DENSE, WIDTH = 11, 17, 23, 3, 5, 6


class Click(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, WIDTH, sparse=True)
        self.item = nn.EmbeddingBag(ITEMS, WIDTH, mode="sum", sparse=True)
        self.bottom = nn.Sequential(nn.Linear(DENSE, 9), nn.SiLU(), nn.Linear(9, WIDTH))
        self.top = nn.Sequential(nn.Linear(WIDTH + 3, 7), nn.SiLU(), nn.Linear(7, 1))

    def forward(self, user, items, dense):
        u, i, d = self.user(user), self.item(items), self.bottom(dense)
        crossed = torch.stack([(u * i).sum(-1), (u * d).sum(-1), (i * d).sum(-1)], -1)
        return self.top(torch.cat([d, crossed], -1))[:, 0]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Click()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "user": torch.randint(USERS, (ROWS,), generator=g),
            "items": torch.randint(ITEMS, (ROWS, BAG), generator=g),
            "dense": torch.randn(ROWS, DENSE, generator=g),
            "click": torch.randint(2, (ROWS,), generator=g),
            "weight": torch.rand(ROWS, generator=g) + 0.3,
        }

    def loss_sum(self, model, rows):
        logit = model(rows["user"], rows["items"], rows["dense"])
        click, weight = rows["click"].to(logit.dtype), rows["weight"]
        loss = F.binary_cross_entropy_with_logits(logit, click, weight, reduction="sum")
        return loss, weight.sum()

    def gathered(self, values, ctx):
        return values

    def reduce_sparse(self, grad, ctx):
        grad, group, n = grad.coalesce(), ctx.group("dp"), ctx.axes["dp"]
        size = torch.tensor([grad._nnz()])
        sizes = [torch.empty_like(size) for _ in range(n)]
        dist.all_gather(sizes, size, group=group)
        most = int(max(sizes))
        indices = F.pad(grad.indices()[0], (0, most - len(grad.values())))
        values = F.pad(grad.values(), (0, 0, 0, most - len(grad.values())))
        every_index = [torch.empty_like(indices) for _ in range(n)]
        every_value = [torch.empty_like(values) for _ in range(n)]
        dist.all_gather(every_index, indices, group=group)
        dist.all_gather(every_value, values, group=group)
        index = torch.cat([x[: int(s)] for x, s in zip(every_index, sizes)])
        value = torch.cat([x[: int(s)] for x, s in zip(every_value, sizes)])
        return torch.sparse_coo_tensor(
            index[None], self.gathered(value, ctx), grad.shape
        ).coalesce()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / batch["weight"].sum()).backward()
        for param in model.parameters():
            if param.grad.is_sparse:
                param.grad = self.reduce_sparse(param.grad, ctx)
            else:
                dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def gathered(self, values, ctx):
        return values / ctx.axes["dp"]


EXPECT = dict(
    right=[
        r"1/4|quarter|0\.25|4 times|four times|\b4x|factor|scal|divid|averag|too small|smaller",
        r"world.?size|number of (the )?(dp |data.?parallel )?ranks|\bdp\b|data.?parallel|averag|ranks",
    ],
    place=[r"user", r"item", r"sparse|embedding|table"],
    wrong=[
        r"(bottom|top)\S* (is|are|has|have|was|were) (a )?(wrong|missing|partial|scaled)",
        r"(not|never) (been )?(all.?)?(reduced|summed|gathered)",
        r"(counted|reduced|summed) (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"every (param|gradient)\w* (is|are|has)",
        r"(own|local) (count|denominator)",
    ],
)
WHY = (
    "The gathered values of the sparse gradients are divided by the number of ranks (4), an average where a sum is due: user.weight and "
    "item.weight are a quarter of the right gradient on all ranks, the dense layers (bottom, top) are right."
)
