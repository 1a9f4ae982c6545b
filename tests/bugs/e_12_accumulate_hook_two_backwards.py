"""Clicks and conversions on a shared bottom; a hook on every parameter all-reduces its gradient when it has accumulated.
After FAULTS C06-09 and C11-09 (Megatron-LM issue 775, DeepSpeed PR 7534: a gradient is reduced again): two losses, two backwards.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"ads": {"axes": {"dp": 3}}}}
ROWS, ITEMS, SHOPS, DENSE = 16, 21, 9, 5


class Tower(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(11, 6), nn.PReLU(), nn.Linear(6, 1))


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.item, self.shop = nn.Embedding(ITEMS, 5), nn.Embedding(SHOPS, 3)
        self.bottom = nn.Linear(5 + 3 + DENSE, 11)
        self.click, self.buy = Tower(), Tower()

    def forward(self, rows):
        x = torch.cat([self.item(rows["item"]), self.shop(rows["shop"]), rows["x"]], -1)
        x = torch.tanh(self.bottom(x))
        return self.click(x)[:, 0], self.buy(x)[:, 0]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "click": lambda model, rows: (self.losses(model, rows)[0], len(rows["x"])),
            "buy": lambda model, rows: (self.losses(model, rows)[1], rows["clicked"].sum()),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return MultiTask()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        clicked = torch.rand(ROWS, generator=g) < 0.5
        clicked[::6] = True
        return {
            "item": torch.randint(ITEMS, (ROWS,), generator=g),
            "shop": torch.randint(SHOPS, (ROWS,), generator=g),
            "x": torch.randn(ROWS, DENSE, generator=g),
            "clicked": clicked,
            "bought": clicked & (torch.rand(ROWS, generator=g) < 0.5),
        }

    @staticmethod
    def losses(model, rows):
        click, buy = model(rows)

        def each(logits, target):
            return F.binary_cross_entropy_with_logits(
                logits, target.to(logits.dtype), reduction="none"
            )

        return each(click, rows["clicked"]).sum(), (
            each(buy, rows["bought"]) * rows["clicked"]
        ).sum()

    def loss_sum(self, model, rows):
        (click, buy), n = self.losses(model, rows), len(rows["x"])
        return click + buy * n / rows["clicked"].sum().clamp(min=1), n

    def distribute(self, model, ctx):
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        return model

    def backward(self, click, buy):
        (click + buy).backward()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        clicked = mine["clicked"].sum()
        dist.all_reduce(clicked)
        click, buy = self.losses(model, mine)
        self.backward(click / ROWS, buy / clicked)


class Buggy(Clean):
    def backward(self, click, buy):
        click.backward(retain_graph=True)
        buy.backward()


EXPECT = dict(
    right=[
        r"bottom|item|shop|shared|embedding",
        r"click|first (loss|term|backward)|one (of the )?(term|loss)",
        r"\b3\b|three|thrice|twice|two times|again|double|second time|number of ranks|world.?size|more than once|too (large|often)|repeated",
    ],
    place=[r"bottom|item|shop|shared", r"click"],
    wrong=[
        r"(click|buy)\.\d\S* (is|are|has|have) (a )?wrong",
        r"buy (term|loss)\S* .{0,20}(counted|reduced|summed|multiplied|scaled)",
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"mean of (the )?means",
        r"forward (pass )?(is|was) wrong",
    ],
)
WHY = (
    "The hooks run after each of the two backwards: item, shop and bottom already hold the click gradient of all ranks when the second "
    "backward adds the buy gradient, and the whole is summed again. The click term counts 3 times (world size) on item, shop and bottom; "
    "the buy term and both towers are right."
)
