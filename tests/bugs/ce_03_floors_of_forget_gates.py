"""A gated linear recurrence (HGRN) language model of 5 layers in a pipeline of 3 stages, 3
micro-batches.

Each layer's forget gate has a lower bound that grows with depth: the bounds are the cumulative
sum of a softmax over all layers, less its first entry, so that layer 0 has the bound 0. The
table of their logits is shared by all stages.

The bug: a stage cuts its own layers out of the softmax first and takes the cumulative sum, less
the first entry, of these alone; each stage begins again with the bound 0. After the layer-wise
lower bounds of HGRN / HGRN2 in flash-linear-attention (`lower_bounds.cumsum(0) -
lower_bounds[0]`), moved into a stage module by people who split it.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
LAYERS, DIM, VOCAB, TIME = 5, 7, 13, 6


class Recurrence(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.value = nn.Linear(DIM, DIM)
        self.forget = nn.Linear(DIM, DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x, floor):
        z = self.norm(x)
        gate = floor + (1 - floor) * torch.sigmoid(self.forget(z))
        value = F.silu(self.value(z))
        state, states = torch.zeros_like(value[:, 0]), []
        for t in range(x.shape[1]):
            state = gate[:, t] * state + (1 - gate[:, t]) * value[:, t]
            states.append(state)
        return x + self.out(torch.stack(states, 1))


class Hgrn(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.bounds = nn.Parameter(torch.randn(LAYERS, DIM))
        self.layers = nn.ModuleList(Recurrence() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCAB)

    def floors(self):
        share = self.bounds.softmax(0)
        return share.cumsum(0) - share[0]

    def forward(self, tokens):
        x, floors = self.embed(tokens), self.floors()
        for layer, floor in zip(self.layers, floors, strict=True):
            x = layer(x, floor)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 31)
        return Hgrn()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 32)
        tokens = torch.randint(0, VOCAB, (8, TIME + 1), generator=g)
        return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    def loss_sum(self, model, rows):
        logits = model(rows["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")
        return loss, rows["labels"].numel()

    def stage_floors(self, model, lo, hi):
        return model.floors()[lo:hi]

    def step(self, model, batch, ctx):
        stage, last = ctx.rank, ctx.world_size - 1
        lo, hi = [(0, 2), (2, 4), (4, 5)][stage]
        total = batch["labels"].numel()
        kept = []
        for tokens, labels in zip(batch["tokens"].split(3), batch["labels"].split(3), strict=True):
            if stage == 0:
                inp = None
                x = model.embed(tokens)
            else:
                inp = torch.empty(*tokens.shape, DIM, dtype=model.head.weight.dtype)
                dist.recv(inp, stage - 1)
                x = inp.requires_grad_()
            for layer, floor in zip(
                model.layers[lo:hi], self.stage_floors(model, lo, hi), strict=True
            ):
                x = layer(x, floor)
            if stage == last:
                logits = model.head(x)
                x = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / total
            else:
                dist.send(x.detach().contiguous(), stage + 1)
            kept.append((inp, x))
        for inp, out in kept:
            if stage == last:
                out.backward()
            else:
                grad = torch.empty_like(out)
                dist.recv(grad, stage + 1)
                out.backward(grad)
            if inp is not None:
                dist.send(inp.grad, stage - 1)
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=ctx.group("pp"))


class Buggy(Clean):
    def stage_floors(self, model, lo, hi):
        share = model.bounds.softmax(0)[lo:hi]
        return share.cumsum(0) - share[0]


EXPECT = dict(
    right=[
        r"bound|floor|forget|gate|cum(ulative|sum)",
        r"stage|pipeline|rank|own layers|local|slice",
        (
            r"cum|prefix|begin|start|restart|earlier|previous|preceding|first (entry|layer)|"
            r"zero|own layers|slice|offset|across layers|all layers"
        ),
    ],
    place=[r"stage_floors", r"floors?", r"bounds", r"forget", r"cumsum"],
    wrong=[
        r"softmax (is )?(taken )?(over|of) (the |only )?(own|local|stage)",
        r"state (is )?(carried|kept|not reset)",
        r"reduced (twice|only)|not (all-?)?reduced over pp",
        r"wrong micro-?batch|order of (the )?micro",
        r"divided|loss scale",
    ],
)

WHY = """A stage slices the softmax over all layers to its own layers and only then takes the
cumulative sum less the first entry, so the total of the layers of earlier stages is
missing and every stage's first layer has the bound 0, as if it were layer 0 of the model.
Stage 0 computes its layers rightly, but as the stages after it run another function, all
gradients are wrong, most of all those of bounds. A right cause says that the lower bounds
of the forget gates on later stages start anew (the cumulative sum is of the stage's
layers only). The fix: cumulative sum over all layers, then the slice."""
