"""Gradients go through a buffer that layers share and are flushed into an accumulator. After FAULTS
C12-05 (Fast-LLM PR 551): the unsharded branch copies instead of adding on later flushes.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}

ROWS, LENGTH, WIDTH, VOCABULARY, MICRO_BATCHES = 14, 5, 9, 17, 3


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens = nn.Linear(LENGTH, LENGTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Mixer() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embed.weight.T


class GradStore:
    """Moves a gradient out of the (shared) buffer as soon as the backward has made it."""

    def __init__(self, model, copy_later):
        self.copy_later, self.params = copy_later, dict(model.named_parameters())
        for name, param in self.params.items():
            param.main_grad, param.fresh = torch.zeros_like(param), True
            param.own_buffer = name.startswith("embed")
            param.register_post_accumulate_grad_hook(self.flush)

    def start(self):
        for param in self.params.values():
            param.fresh = True

    def flush(self, param):
        if param.fresh or (self.copy_later and not param.own_buffer):
            param.main_grad.copy_(param.grad)
        else:
            param.main_grad.add_(param.grad)
        param.fresh, param.grad = False, None

    def reduce(self, group):
        for param in self.params.values():
            dist.all_reduce(param.main_grad, group=group)


class Clean:
    num_microbatches = MICRO_BATCHES
    copy_later = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g)
        labels = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g)
        ignored = torch.rand(ROWS, LENGTH, generator=g) < 0.2
        return {"ids": ids, "labels": labels.masked_fill(ignored, -100)}

    def loss_sum(self, model, rows):
        labels = rows["labels"].flatten()
        loss = F.cross_entropy(model(rows["ids"]).flatten(0, 1), labels, reduction="sum")
        return loss, (labels != -100).sum()

    def distribute(self, model, ctx):
        self.store = GradStore(model, self.copy_later)
        return model

    def gradient_of(self, name, param, ctx):
        return param.main_grad

    def step(self, model, batch, ctx):
        self.store.start()
        count = (batch["labels"] != -100).sum()
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        for i in range(MICRO_BATCHES):
            rows = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            loss, _ = self.loss_sum(model, rows)
            (loss / count).backward()
        self.store.reduce(ctx.group("dp"))


class Buggy(Clean):
    copy_later = True


EXPECT = dict(
    right=[
        r"micro.?batch|rows?|accumulat|overwrit|backward|copie[ds]|contribut",
        r"last|only|lost|missing|dropped|overwrit|not (added|accumulated)|earlier|first|absent"
        r"|without|replac|lack|left out|copie",
    ],
    place=[r"layers|norm|all (parameters )?(but|except)|row|micro.?batch|parameters"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|two times|2 times|3 times)|reduced (twice|again)",
        r"(?<!but )(?<!except )(?<!than )embed\S* (is|has) (wrong|missing|lost|lack)",
        r"mean of (the )?means",
        r"not zeroed|stale|left over",
    ],
)

WHY = (
    "All parameters but the tied embedding keep only the last micro-batch of each rank, because "
    "every flush overwrites the accumulator: the rows of the first two micro-batches are lost."
)
