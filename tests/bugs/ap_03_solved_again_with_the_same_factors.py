"""Graph diffusion on three data-parallel ranks, two micro-batches each: node features go through an encoder, are spread by personalised PageRank, (I - a P) z = h with P the row-normalised directed adjacency of the own graph, and are
classified. The solve is an own autograd Function that keeps the LU factors of the forward. Loss sum / all nodes, gradients summed over dp.

The bug: the backward solves with the kept factors as they are, (I - a P) g = dz, instead of with the transposed matrix. That is right for an undirected, symmetrically normalised graph only. After SciML/LinearSolve.jl issue 92 / 1302
and cai4cai/torchsparsegradutils issue 84 (non-symmetric systems need the transposed solve in the backward).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
NODES, FEATURES, WIDTH, CLASSES, DAMPING = 5, 4, 6, 3, 0.8
PARTS = [[(0, 2), (2, 3)], [(3, 4), (4, 5)], [(5, 6), (6, 8)]]
ROWS = 8


class Diffusion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, matrix, h, transposed):
        factors, pivots = torch.linalg.lu_factor(matrix)
        ctx.save_for_backward(factors, pivots)
        ctx.transposed = transposed
        return torch.linalg.lu_solve(factors, pivots, h)

    @staticmethod
    def backward(ctx, grad):
        factors, pivots = ctx.saved_tensors
        return (
            None,
            torch.linalg.lu_solve(factors, pivots, grad.contiguous(), adjoint=ctx.transposed),
            None,
        )


class Spread(nn.Module):
    def __init__(self):
        super().__init__()
        self.mode = None

    def forward(self, h, edges):
        p = edges / edges.sum(-1, keepdim=True).clamp(min=1)
        matrix = torch.eye(NODES, dtype=h.dtype, device=h.device) - DAMPING * p.to(h.dtype)
        if self.mode is None:
            return torch.linalg.solve(matrix, h)
        return Diffusion.apply(matrix, h, self.mode)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.spread = Spread()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x, edges):
        return self.head(torch.tanh(self.norm(self.spread(self.encoder(x), edges))))


class Clean:
    transposed = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, NODES, FEATURES, generator=g),
            "edges": (torch.rand(ROWS, NODES, NODES, generator=g) < 0.4).double(),
            "label": torch.randint(CLASSES, (ROWS, NODES), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["x"], rows["edges"])
        return F.cross_entropy(
            logits.flatten(0, 1), rows["label"].flatten(), reduction="sum"
        ), rows["label"].numel()

    def distribute(self, model, ctx):
        model.spread.mode = self.transposed
        return model

    def step(self, model, batch, ctx):
        for low, high in PARTS[ctx.rank]:
            loss, _ = self.loss_sum(model, {k: v[low:high] for k, v in batch.items()})
            (loss / (ROWS * NODES)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    transposed = False


EXPECT = dict(
    right=[
        r"(?i)spread|diffusion|solve",
        r"(?i)backward|adjoint|transpos|gradient (of|that)|hands? (back|on)",
    ],
    place=[r"(?i)spread|diffusion|lu_solve"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)(head|norm)\.(weight|bias) (is|are) wrong|(head|norm)'?s? (backward|gradient) is wrong",
        r"(?i)only (on )?rank [012]\b|rank [012] alone|only the (first|last) micro.?batch",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|recomput",
        r"(?i)detach|cut off|no gradient (reaches|goes)",
    ],
)
WHY = (
    "Diffusion.backward (module `spread`) solves (I - aP) g = dz with the forward's LU factors; the adjoint is (I - aP)^T g = dz, and P (directed, row-normalised) is not symmetric. The forward is right. On all three ranks, "
    "in all micro-batches and rows, the gradient "
    "handed to the encoder's output goes to the wrong nodes: encoder.0 and encoder.2 weights (and biases) are wrong in direction, norm and head are right. Sum over dp, divisor 40, data are right. Fix: lu_solve(..., adjoint=True)."
)
