"""DTensor tensor parallelism over three ranks with sequence parallel norms: an own RMSNorm works on local shards of the sequence and takes its
replicated weight by to_local(). After PyTorch's notes on `grad_placements` of DTensor.to_local: the gradient of the weight is a part per
rank, and without grad_placements it is taken for the whole.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH, HIDDEN = 4, 9, 20, 12, 18


class Norm(nn.Module):
    """An RMSNorm as a kernel would do it: on plain tensors."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH) + 0.2 * torch.randn(WIDTH))
        self.grad_placements = None

    def forward(self, x):
        weight, mesh = self.weight, None
        if isinstance(x, DTensor):
            mesh, x = x.device_mesh, x.to_local()
            weight = weight.to_local(grad_placements=self.grad_placements)
        y = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
        return y if mesh is None else DTensor.from_local(y, mesh, [Shard(1)], run_check=False)


class GLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (
            nn.Linear(WIDTH, HIDDEN, bias=False),
            nn.Linear(WIDTH, HIDDEN, bias=False),
        )
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        # a running mean over the past mixes the positions
        past = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        u = self.up(x).cumsum(1) / past
        return self.down(F.silu(self.gate(x)) * u)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norms = nn.ModuleList(Norm() for _ in range(2))
        self.glus = nn.ModuleList(GLU() for _ in range(2))
        self.last, self.head = Norm(), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for norm, glu in zip(self.norms, self.glus, strict=True):
            x = x + glu(norm(x))
        return self.head(self.last(x))


def token_loss(model, ids):
    logits = model(ids[:, :-1]).flatten(0, 1)
    return F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")


class Clean:
    grad_placements = (Partial(),)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return LM()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {"ids": torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)}

    def loss_sum(self, model, rows):
        return token_loss(model, rows["ids"]), len(rows["ids"]) * LENGTH

    def distribute(self, model, ctx):
        mesh = ctx.mesh["tp"]
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan = {
            "embed": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
            )
        }
        for i in range(2):
            plan |= {
                f"glus.{i}": whole,
                f"glus.{i}.gate": ColwiseParallel(),
                f"glus.{i}.up": ColwiseParallel(),
                f"glus.{i}.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }
        plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(model, mesh, plan)
        for norm in (*model.norms, model.last):
            norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh, [Replicate()]))
            norm.grad_placements = self.grad_placements
        return model

    def step(self, model, batch, ctx):
        count = len(batch["ids"]) * LENGTH
        for ids in batch["ids"].split((1, 3)):
            (token_loss(model, ids) / count).backward()
        for norm in (*model.norms, model.last):
            g = norm.weight.grad
            norm.weight.grad = g.redistribute(g.device_mesh, [Replicate()])


class Buggy(Clean):
    grad_placements = None


EXPECT = dict(
    right=[
        r"norms\.\d|last|norm",
        r"partial|part of|own part|(never|not|missing|lack|without) .{0,40}(reduc|sum)|sum over tp|(reduc|sum)\w* .{0,40}(missing|never|not)|each rank|differ",
    ],
    place=[r"norms\.\d\.weight|last\.weight|norm"],
    wrong=[
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"(embed|gate|up|down|head)\S*\.weight (is|are|has|have) .{0,15}wrong",
        r"forward .{0,40}(goes|is) wrong in",
        r"(own|local) (count|denominator|divisor)",
        r"factor (of )?(3|1/3)",
    ],
)
WHY = (
    "The replicated weights of the three norms are taken by to_local() without grad_placements=[Partial()], so the gradient of the rank's own third of "
    "the sequence is taken as the replicated whole, and the following redistribute does nothing. norms.0.weight, norms.1.weight and last.weight "
    "hold on each rank a part only; the sum of the three ranks' would be right. All other parameters, forward and backward are right."
)
