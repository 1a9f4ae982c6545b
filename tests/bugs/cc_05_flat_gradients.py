"""A small mixer trained with hand-written data parallelism on four ranks: at set-up all .grad are made views of one flat buffer, backward of three micro-batches accumulates into them, and at the end one all-reduce
of the flat buffer does the whole gradient reduction.

The bug: the step begins with model.zero_grad(), which since torch 2.0 sets .grad to None: autograd then allocates new gradients that are no longer views of the flat buffer, the one all-reduce adds up zeros, and each rank
keeps its own gradient. After the many reports on flat/contiguous gradients (Apex, FairScale, ColossalAI chunks) and the change of the default to set_to_none=True.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
ROWS, TOKENS, WIDTH, HIDDEN = 15, 5, 7, 11


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.across = nn.Sequential(nn.Linear(TOKENS, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, TOKENS))
        self.within = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = x + self.across(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        x = x + self.within(self.norms[1](x))
        return self.head(x.mean(1))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Mixer()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, TOKENS, WIDTH, generator=g),
            "y": torch.randn(ROWS, 3, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["x"]) - rows["y"]).square().sum(), len(rows["x"])

    def distribute(self, model, ctx):
        params = list(model.parameters())
        model.flat_grad = params[0].new_zeros(sum(p.numel() for p in params))
        at = 0
        for p in params:
            p.grad = model.flat_grad[at : at + p.numel()].view_as(p)
            at += p.numel()
        return model

    def zero_grad(self, model):
        model.flat_grad.zero_()

    def step(self, model, batch, ctx):
        self.zero_grad(model)
        rows = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        for n in range(3):
            loss, _ = self.loss_sum(model, {k: v.tensor_split(3)[n] for k, v in rows.items()})
            (loss / ROWS).backward()
        dist.all_reduce(model.flat_grad, group=ctx.group("dp"))


class Buggy(Clean):
    def zero_grad(self, model):
        model.flat_grad.zero_()
        model.zero_grad()


EXPECT = dict(
    right=[
        r"(not|never|n't|no longer|without|missing|lack|un)\W{0,3}(be |been |being |a |any |yet )?(all.?)?(reduc|sum|in the (flat )?buffer|view|exchang|communicat)|own (rows|gradient|share|part|contribution)|only (its|the) own|local gradient|stale|(zeros?|other tensor|other memory|another tensor|unrelated|empty).{0,60}reduc|reduc.{0,60}(zeros?|other tensor|other memory|another tensor|empty|nothing)|zero_grad|set_to_none|view"
    ],
    place=[
        r"flat_grad",
        r"zero_grad|set_to_none",
        r"all.?reduce",
        r"every parameter|all parameters|\.grad",
    ],
    wrong=[
        r"reduced twice|counted (twice|four times|4 times)|times too large",
        r"divisor|denominator|mean of (the )?means",
        r"last micro.?batch only|only the last micro.?batch|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
        r"wrong rows|same rows",
    ],
)
WHY = (
    "model.zero_grad() sets every .grad to None, so that backward puts the gradients in new tensors and the flat buffer, which alone is all-reduced, stays zero. Each of the four ranks therefore ends with the gradient of its own "
    "rows only (4, 4, 4 and 3 of 15), for all parameters, while the all-reduce runs over zeros; losses and divisor are right. A right cause says that the gradients were not reduced over the ranks (because what is reduced is not the tensor in .grad / the views are lost). "
    "Fix: zero_grad(set_to_none=False) or only zero the flat buffer."
)
