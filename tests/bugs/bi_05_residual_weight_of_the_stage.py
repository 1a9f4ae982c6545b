"""A text classifier of five layers with DeepNorm (x = norm(alpha * x + f(x)), alpha = (2 * layers) ** 1/4) in a pipeline of three stages with two, one and two layers; three micro-batches of uneven size, all forwards and then all
backwards, with activations sent to the next stage and gradients back.

The bug: alpha is computed from the layers that the stage has. DeepNorm is in facebookresearch/xformers PR 230 (DeepNorm/DeepNet support), where the coefficients are made from the numbers of layers of the whole model.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
VOCABULARY, TOKENS, WIDTH, CLASSES, ROWS = 11, 5, 8, 4, 9
STAGES = [(0, 2), (2, 3), (3, 5)]
PARTS = [(0, 2), (2, 6), (6, 9)]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(TOKENS, TOKENS)
        self.wide, self.narrow = nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)
        self.norm_mix, self.norm_wide = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x, alpha):
        x = self.norm_mix(alpha * x + torch.tanh(self.mix(x.transpose(1, 2))).transpose(1, 2))
        return self.norm_wide(alpha * x + self.narrow(F.silu(self.wide(x))))


class Net(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(n): Layer() for n in range(depth)})
        self.head = nn.Linear(WIDTH, CLASSES)
        self.depth = depth

    @property
    def alpha(self):
        return (2 * self.depth) ** 0.25

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x, self.alpha)
        return x if self.head is None else self.head(x.mean(1))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net(STAGES[-1][1])

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        loss = F.cross_entropy(model(rows["ids"]), rows["label"], reduction="sum")
        return loss, len(rows["label"])

    def stage_depth(self, model):
        return model.depth

    def distribute(self, model, ctx):
        low, high = STAGES[ctx.rank]
        model.layers = nn.ModuleDict({str(n): model.layers[str(n)] for n in range(low, high)})
        model.depth = self.stage_depth(model)
        if ctx.rank > 0:
            model.embed = None
        if ctx.rank < ctx.world_size - 1:
            model.head = None
        return model

    def step(self, model, batch, ctx):
        rank, last = ctx.rank, ctx.world_size - 1
        dtype = next(model.parameters()).dtype
        model.zero_grad()
        taken, given = [], []
        for low, high in PARTS:
            if rank == 0:
                x = batch["ids"][low:high]
            else:
                x = torch.empty(high - low, TOKENS, WIDTH, dtype=dtype)
                dist.recv(x, rank - 1)
                x.requires_grad_()
            y = model(x)
            if rank == last:
                y = F.cross_entropy(y, batch["label"][low:high], reduction="sum") / ROWS
            else:
                dist.send(y.detach().contiguous(), rank + 1)
            taken.append(x)
            given.append(y)
        for x, y in zip(taken, given):
            if rank == last:
                y.backward()
            else:
                grad = torch.empty_like(y)
                dist.recv(grad, rank + 1)
                y.backward(grad)
            if rank > 0:
                dist.send(x.grad, rank - 1)


class Buggy(Clean):
    def stage_depth(self, model):
        return len(model.layers)


EXPECT = dict(
    right=[
        r"(?i)layers?\.0|norm_mix|alpha|Layer\b|depth|residual",
        r"(?i)alpha|scal|times|factor|depth|residual|multipl|mul\b|number of layers|argument",
    ],
    place=[r"(?i)alpha|depth|norm_mix|layers\.0"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|receive.{0,30}(overwrit|reused)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own (rows|count)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read|swapped)",
        r"(?i)embed(\.weight)? goes wrong in (its|the) forward|\bmix\b (is|goes) wrong (in its forward )?first",
        r"(?i)layers? (are )?(skipped|left out|in another order|called twice)|recomput|labels? .{0,20}(is|are) wrong",
        r"(?i)only (on )?rank [012]\b",
    ],
)
WHY = (
    "alpha must be (2 * 5) ** 0.25 = 1.778 on all stages. With stage_depth = len(model.layers) the model's depth becomes that of the stage: 2 on ranks 0 and 2 (alpha = 4 ** 0.25 = 1.414) and 1 on rank 1 (alpha = 2 ** 0.25 = 1.189). In "
    "every layer, in both sums alpha * x + f(x), the residual x has too little weight; the forward goes wrong on rank 0 in layers.0 (what goes into norm_mix; embed and mix are right), and so on in all layers on all ranks, in all "
    "micro-batches and rows. Sends, order of micro-batches, divisor 9 are right. Fix: depth of the whole model on each stage."
)
