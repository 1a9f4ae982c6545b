"""Sharpness-aware minimisation under FSDP2 with replicas: a first backward gives the direction, its norm the length of the step to the
perturbed weights, a second backward there gives the gradient. After public SAM implementations' notes on sharded training (davda54/sam
issues on multi-GPU and FSDP) and FAULTS C17-08 (SpecForge PR 663: the norm of the rank's own shard).
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"replicate": 2, "shard": 2}}}}
ROWS, INPUTS, WIDTH, CLASSES, RHO = 15, 6, 9, 4, 0.6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.one, self.two = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 13),
            nn.Linear(13, WIDTH),
        )

    def forward(self, x):
        return x + self.two(F.gelu(self.one(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        params = dict(model.named_parameters())
        loss = F.cross_entropy(model(rows["x"]), rows["y"])
        grads = torch.autograd.grad(loss, list(params.values()))
        norm = sum(g.square().sum() for g in grads).sqrt()
        moved = {k: p + RHO * g / norm for (k, p), g in zip(params.items(), grads)}
        logits = functional_call(model, moved, (rows["x"],))
        return F.cross_entropy(logits, rows["y"], reduction="sum"), len(rows["y"])

    def distribute(self, model, ctx):
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def total(self, squares):
        return squares.full_tensor() if isinstance(squares, DTensor) else squares

    def norm(self, model):
        return sum(self.total(p.grad.square().sum()) for p in model.parameters()).sqrt()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        (F.cross_entropy(model(mine["x"]), mine["y"], reduction="sum") / ROWS).backward()
        with torch.no_grad():
            scale, kept = RHO / self.norm(model), []
            for param in model.parameters():
                local = param.to_local()
                kept.append(local.clone())
                local.add_(param.grad.to_local() * scale)
        model.zero_grad()
        (F.cross_entropy(model(mine["x"]), mine["y"], reduction="sum") / ROWS).backward()
        with torch.no_grad():
            for param, old in zip(model.parameters(), kept):
                param.to_local().copy_(old)


class Buggy(Clean):
    def total(self, squares):
        return squares.to_local()


EXPECT = dict(
    right=[
        r"forward|weights?|parameters?|second|pass|call|activation|output|perturb|norm|gradient",
        r"all param|every (parameter|gradient)|all gradients|(enter|out|blocks)\S*|second (forward|backward|call|pass)|"
        r"weights differ|(first|second) (call|use)",
    ],
    place=[
        r"enter",
        r"second (forward|backward|call|pass)",
        r"(all|every|each) ranks?|ranks? \W?[0-3]",
        r"blocks",
    ],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"loss .{0,20}(divided|normali[sz]ed) by (its|the|their) own",
        r"(rows?|micro-?batch(es)?) \S* ?(is|are|was|were) (lost|missing|dropped)",
        r"replicas? .{0,30}(never|not) (reduced|summed)",
    ],
)
WHY = (
    "The norm that scales the perturbation is that of the rank's own shard (smaller than the whole), so the two shards move by "
    "different and too large steps, and the second forward and backward run at weights other than those meant. The gradients of all "
    "parameters on all ranks are taken at the wrong point; their reduction is right."
)
