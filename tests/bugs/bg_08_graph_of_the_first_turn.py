"""Classifying small point clouds (six points, their neighbours as a matrix) with two graph convolutions on three ranks: three, two and one micro-batches of two clouds. Gradients go through one flat buffer that is summed over the ranks; the
divisor is the number of clouds. A graph convolution normalises the matrix (own loops, root of the degrees on both sides).

The bug: the convolutions keep the normalised matrix of their first call, an option for the one graph of a transductive task, and the later micro-batches pass messages along the edges of the first. After cached=True of GCNConv: pyg-team/
pytorch_geometric issues 619 and 1173, and 7173 (batch_size makes errors in gcn).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
POINTS, FEATURES, WIDTH, CLASSES, PER = 6, 4, 7, 3, 2
PARTS = [[(0, 2), (2, 4), (4, 6)], [(6, 8), (8, 10)], [(10, 12)]]
ROWS = 12


class GraphConv(nn.Module):
    def __init__(self, wide, out):
        super().__init__()
        self.linear = nn.Linear(wide, out, bias=False)
        self.bias = nn.Parameter(torch.randn(out) * 0.1)
        self.cached, self.matrix = False, None

    def normalised(self, edges, dtype):
        loops = edges.to(dtype) + torch.eye(POINTS, dtype=dtype)
        root = loops.sum(-1).rsqrt()
        return root[:, :, None] * loops * root[:, None, :]

    def forward(self, x, edges):
        if self.cached and self.matrix is not None:
            matrix = self.matrix
        else:
            matrix = self.normalised(edges, x.dtype)
            self.matrix = matrix if self.cached else None
        return matrix @ self.linear(x) + self.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.near, self.far = GraphConv(FEATURES, WIDTH), GraphConv(WIDTH, WIDTH)
        self.skip, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x, edges):
        y = F.silu(self.near(x, edges))
        y = F.silu(self.far(y, edges) + self.skip(x))
        return self.head(y.mean(1))


class Clean:
    one_graph = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        place = torch.rand(ROWS, POINTS, 2, generator=g)
        near = torch.cdist(place, place).topk(3, largest=False).indices[..., 1:]
        edges = torch.zeros(ROWS, POINTS, POINTS, dtype=torch.int64).scatter(2, near, 1)
        return {
            "x": torch.randn(ROWS, POINTS, FEATURES, generator=g),
            "edges": edges | edges.transpose(1, 2),
            "kind": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["x"], rows["edges"])
        return F.cross_entropy(logits, rows["kind"], reduction="sum"), len(logits)

    def distribute(self, model, ctx):
        model.near.cached = model.far.cached = self.one_graph
        return model

    def step(self, model, batch, ctx):
        for low, high in PARTS[ctx.rank]:
            loss, _ = self.loss_sum(model, {k: v[low:high] for k, v in batch.items()})
            (loss / ROWS).backward()
        params = list(model.parameters())
        flat = torch.cat([p.grad.flatten() for p in params])
        dist.all_reduce(flat, group=ctx.group("dp"))
        for p, piece in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.grad.copy_(piece.view_as(p))


class Buggy(Clean):
    one_graph = True


EXPECT = dict(
    right=[
        r"(?i)near|far|graph|matrix|edges",
        r"(?i)micro.?batch(es)? (1|2|[^.]{0,20}(after|but|except|later|second|further))|after the first|later micro|"
        r"second micro|from micro.?batch|not the first|first micro.?batch|left over|previous|earlier|stale|kept|cache|state",
        r"(?i)forward|cache|kept|stale|state|attribute|matrix",
    ],
    place=[r"(?i)\bnear\b|matrix|GraphConv"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|flat buffer .{0,30}wrong",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)the first micro.?batch.{0,25}(goes|is) wrong|all micro.?batch.{0,20}wrong|rank 2.{0,25}(goes|is) wrong",
        r"(?i)labels? .{0,20}(is|are) (wrong|of)|recomput|detached|wrong backward",
        r"(?i)\bskip(\.\w+)? (goes|is) (first )?wrong",
    ],
)
WHY = (
    "GraphConv keeps the normalised matrix of its first call (cached), so all later micro-batches (and steps) use the edges of the rank's first two clouds: rank 0 micro-batches 1 and 2 (rows 2-5), rank 1 micro-batch 1 (rows 8, 9). The first "
    "micro-batch of each rank, and so rank 2 (rows 10, 11), is right, in the second step too, as the batch is the same. The forward goes wrong at `near` (its linear is right, the matrix is of other rows), then `far`. Gradients of all parameters are "
    "wrong. Inputs, labels, flat buffer, divisor 12 are right. Fix: cached False (or one graph per key)."
)
