"""A session recommender (GRU cell over five clicks, scores of all items from the table of the
inputs, tied), data parallel over three ranks (4, 4 and 3 of 11 sessions) in micro-batches of two.
Gradients come from torch.func.grad over functional_call; a dictionary adds them up by name and
hands them to the parameters at the end.

The tied table has two names in the dictionary, each with the gradient of its own use.

Bug: handing over sets .grad for one name after the other, so that the later name of the table
replaces what the earlier one brought. After functional training loops and tied weights.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, T, ITEMS, D = 11, 5, 9, 6


class Sessions(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, D)
        self.cell = nn.GRUCell(D, D)
        self.mix = nn.Linear(D, D)
        self.scores = nn.Linear(D, ITEMS, bias=False)
        self.scores.weight = self.items.weight

    def forward(self, clicks):
        state = self.items.weight.new_zeros(clicks.shape[0], D)
        for x in self.items(clicks).unbind(1):
            state = self.cell(x, state)
        return self.scores(torch.tanh(self.mix(state)))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 77)
        return Sessions()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 770)
        clicks = torch.randint(ITEMS, (ROWS, T + 1), generator=g)
        return {"clicks": clicks[:, :-1].contiguous(), "next": clicks[:, -1].contiguous()}

    def loss_sum(self, model, rows):
        loss = F.cross_entropy(model(rows["clicks"]), rows["next"], reduction="sum")
        return loss, rows["next"].numel()

    def named(self, model):
        return dict(model.named_parameters(remove_duplicate=False))

    def part_of_loss(self, values, model, rows):
        scores = functional_call(model, values, (rows["clicks"],), tie_weights=False)
        return F.cross_entropy(scores, rows["next"], reduction="sum") / ROWS

    def hand_over(self, model, total):
        for name, p in self.named(model).items():
            p.grad = total[name] if p.grad is None else p.grad + total[name]

    def step(self, model, batch, ctx):
        values = {k: p.detach() for k, p in self.named(model).items()}
        total = {k: torch.zeros_like(p) for k, p in values.items()}
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in own.split(2):
            rows = {k: v[part] for k, v in batch.items()}
            found = grad(self.part_of_loss)(values, model, rows)
            total = {k: total[k] + g for k, g in found.items()}
        model.zero_grad()
        self.hand_over(model, total)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def hand_over(self, model, total):
        for name, p in self.named(model).items():
            p.grad = total[name]


EXPECT = dict(
    right=[
        r"items|scores|tied|shared|table|embedding|two names|both names",
        r"overwrit|replac|lost|lacks?|missing|only (the|one)|not added|instead of add|without|"
        r"discard|dropped|assign",
        r"lookup|input|embedding|items|use|hand_over|name",
    ],
    place=[r"hand_over", r"p\.grad = total", r"items\.weight", r"scores\.weight"],
    wrong=[
        r"(not|never|missing).{0,30}(all.?reduc|summed over dp)",
        r"micro.?batch.{0,40}(lost|overwrit|only the last|replac)",
        r"(scores|head|output).{0,40}(gradient|use).{0,20}(is|was) (lost|missing|overwritten)",
        r"GRUCell|cell.{0,30}wrong",
        r"uneven (rows|shares)",
    ],
)
WHY = """named_parameters(remove_duplicate=False) lists the tied table as items.weight and as
scores.weight, and functional_call with tie_weights=False gives each name the gradient of its own
use. Buggy.hand_over assigns p.grad for both names: scores.weight comes later and replaces the
gradient of the lookup. Only the table is wrong: it lacks the share of the input embedding. Right
causes say that. Fix: add the gradients of all names of one parameter (p.grad + total[name])."""
