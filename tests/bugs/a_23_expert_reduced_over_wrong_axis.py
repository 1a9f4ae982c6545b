"""Expert parallelism on a two-axis mesh; experts have a gradient reduction of their own. After
FAULTS C09-06 and C16 (process group of expert data parallelism).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "ep": 2}}}}

ROWS, LENGTH, VOCABULARY, WIDTH, EXPERTS = 10, 4, 15, 8, 4


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
    expert_axis = "dp"  # the ranks with the same experts

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
        loss, count = self.loss_sum(model, mine)
        dist.all_reduce(count)
        (loss / count).backward()
        for name, param in model.named_parameters():
            group = ctx.group(self.expert_axis) if "experts" in name else ctx.group()
            dist.all_reduce(param.grad, group=group)


class Buggy(Clean):
    expert_axis = "ep"


EXPECT = dict(
    right=[
        r"expert",
        (
            r"(wrong|other|another) (group|axis)|over (axis )?ep|@ep|axis ep|mix|(different"
            r"|unlike|other) (experts|parameters|weights)|over dp|not reduced|never reduced"
            r"|not summed|never summed|missing.{0,40}(reduc|sum)|unreduced|without (a |the "
            r"|any )?(reduc|all.?reduce|sum)|own (part|share|rows|contribution)|partial"
            r"|no (reduc|all.?reduce|collective)|lacks? .{0,60}(rank|part|sum|reduc)|only (its"
            r"|their|the) own|(reduction|all.?reduce|sum).{0,40}(missing|left out|skipped"
            r"|absent)|stays? local|local to (each|its)|out of the reduc"
        ),
    ],
    place=[r"expert"],
    wrong=[r"mean of (the )?means", r"rows? .{0,30}(lost|missing|dropped)", r"router.{0,30}wrong"],
)

WHY = (
    "Expert gradients are summed over the ep group, whose ranks hold other experts, and never "
    "over the dp group of their replicas."
)
