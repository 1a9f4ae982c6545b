"""Mixture of experts with expert parallelism; dense parameters are averaged over all ranks.
After FAULTS C09-02 (Megatron-LM PR 5956).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "ep": 3}}}}

ROWS, LENGTH, VOCABULARY, WIDTH, EXPERTS = 12, 4, 16, 8, 6


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class MoE(nn.Module):
    """Top-1 experts; with a group, tokens travel to the rank that holds their expert and back."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.group = None

    def forward(self, x):
        gate, chosen = self.router(x).softmax(-1).max(-1)
        out = self.run(x, chosen) if self.group is None else self.dispatch(x, chosen)
        return gate[:, None] * out

    def run(self, x, chosen):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            if isinstance(expert, Expert):
                at = torch.nonzero(chosen == e)[:, 0]
                out = out.index_add(0, at, expert(x[at]))
        return out

    def dispatch(self, x, chosen):
        size = dist.get_world_size(self.group)
        order = torch.argsort(chosen, stable=True)
        sent = torch.bincount(chosen // (EXPERTS // size), minlength=size)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=self.group)
        sizes = got.tolist(), sent.tolist()
        which = torch.empty(sum(sizes[0]), dtype=torch.int64)
        dist.all_to_all_single(which, chosen[order].contiguous(), *sizes, group=self.group)
        there = torch.empty(len(which), WIDTH, dtype=x.dtype)
        there = all_to_all_single(there, x[order], *sizes, group=self.group)
        done = self.run(there, which)
        back = all_to_all_single(torch.empty_like(x), done, *reversed(sizes), group=self.group)
        return self.combine(back, order)

    def combine(self, back, order):
        return torch.zeros_like(back).index_copy(0, order, back)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = MoE()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.moe(self.norm(x).flatten(0, 1)).view_as(x)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=g)
        padding = torch.arange(LENGTH) >= lengths
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(padding, -100)}

    def loss_sum(self, model, rows):
        labels = rows["labels"]
        logits = model(rows["ids"]).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()

    def distribute(self, model, ctx):
        per = EXPERTS // ctx.axes["ep"]
        for e in range(EXPERTS):
            if e // per != ctx.coords["ep"]:
                model.moe.experts[e] = nn.Identity()
        model.moe.group = ctx.group("ep")
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        count = (mine["labels"] != -100).sum()
        dist.all_reduce(count)
        (loss * ctx.world_size / count).backward()
        for name, param in model.named_parameters():
            if "experts" in name:
                self.average_expert(param.grad, ctx)
            else:
                dist.all_reduce(param.grad)
                param.grad /= ctx.world_size

    def average_expert(self, grad, ctx):
        dist.all_reduce(grad, group=ctx.group("dp"))
        grad /= ctx.world_size  # it has the tokens of all expert parallel ranks


class Buggy(Clean):
    def average_expert(self, grad, ctx):
        dist.all_reduce(grad, group=ctx.group("dp"))
        grad /= ctx.axes["dp"]


EXPECT = dict(
    right=[
        r"expert",
        (
            r"(times|factor|by|of|is|=|x) ?3(\.0+)?\b|\b3(\.0+)? ?(times|x\b)"
            r"|size of (axis )?ep|three times"
        ),
    ],
    place=[r"expert"],
    wrong=[
        r"not reduced|never reduced|missing all.?reduce",
        r"rows? .{0,30}(lost|missing|dropped)",
        r"mean of (the )?means",
    ],
)

WHY = (
    "Expert gradients hold the tokens of all 6 ranks but are divided by the 2 of expert data "
    "parallelism: 3 times too large."
)
