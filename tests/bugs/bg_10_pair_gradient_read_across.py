"""A small model of residue pairs with dynamic axial parallelism: the pair matrix of seven residues is cut by rows over three ranks (3, 2 and 2). One triangle multiplication of the kind `incoming` (out[i, j] is the sum over k of a[k, i] b[k, j],
k lies across the ranks) as an autograd Function with a reduce-scatter, then the distance class of every pair. Three micro-batches of proteins. Gradients are summed over the ranks; the divisor is the number of pairs.

The bug: the gradient of b is made with the output's gradient read as [j, i]. The matrix is square, so it fits. After the two conventions of the incoming update that differ by a transposition: google-deepmind/alphafold issue 77
(Supplement/source code discrepancy in TriangleMultiplicationIncoming).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dap": 3}}}}
RESIDUES, FEATURES, WIDTH, CLASSES, ROWS = 7, 4, 5, 4, 5
CUTS = [(0, 3), (3, 5), (5, 7)]
PARTS = [(0, 2), (2, 3), (3, 5)]


class Incoming(torch.autograd.Function):
    """sum over k of a[k, i] b[k, j]; every rank has its k and gets its i."""

    @staticmethod
    def forward(ctx, a, b, cut, group, rule):
        ctx.save_for_backward(a, b)
        ctx.cut, ctx.group, ctx.rule = cut, group, rule
        out = torch.einsum("nkic,nkjc->nijc", a, b)
        dist.all_reduce(out, group=group)
        return out[:, cut[0] : cut[1]].clone()

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        whole = grad.new_zeros(len(grad), RESIDUES, RESIDUES, grad.shape[-1])
        whole[:, ctx.cut[0] : ctx.cut[1]] = grad
        dist.all_reduce(whole, group=ctx.group)
        of_a = torch.einsum("nijc,nkjc->nkic", whole, b)
        of_b = torch.einsum(ctx.rule, whole, a)
        return of_a, of_b, None, None, None


class Triangle(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm_out = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.a, self.a_gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b, self.b_gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cut, self.group, self.rule = None, None, None

    def forward(self, z):
        z = self.norm(z)
        a = torch.sigmoid(self.a_gate(z)) * self.a(z)
        b = torch.sigmoid(self.b_gate(z)) * self.b(z)
        if self.group is None:
            y = torch.einsum("nkic,nkjc->nijc", a, b)
        else:
            y = Incoming.apply(a, b, self.cut, self.group, self.rule)
        return torch.sigmoid(self.gate(z)) * self.out(self.norm_out(y))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(FEATURES, WIDTH), nn.Linear(FEATURES, WIDTH)
        self.triangle = Triangle()
        self.wide, self.head = nn.Linear(WIDTH, 9), nn.Linear(9, CLASSES)

    def forward(self, x, cut=(0, RESIDUES)):
        z = self.left(x[:, cut[0] : cut[1], None]) + self.right(x[:, None])
        z = z + self.triangle(z)
        return self.head(F.silu(self.wide(z)))


def pair_loss(model, x, distance, cut):
    logits = model(x, cut)
    target = distance[:, cut[0] : cut[1]]
    return F.cross_entropy(logits.flatten(0, 2), target.flatten(), reduction="sum")


class Clean:
    rule = "nijc,nkic->nkjc"

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, RESIDUES, FEATURES, generator=g),
            "distance": torch.randint(CLASSES, (ROWS, RESIDUES, RESIDUES), generator=g),
        }

    def loss_sum(self, model, rows):
        loss = pair_loss(model, rows["x"], rows["distance"], (0, RESIDUES))
        return loss, rows["distance"].numel()

    def distribute(self, model, ctx):
        model.triangle.cut, model.triangle.group = CUTS[ctx.rank], ctx.group("dap")
        model.triangle.rule = self.rule
        return model

    def step(self, model, batch, ctx):
        for low, high in PARTS:
            x, distance = batch["x"][low:high], batch["distance"][low:high]
            loss = pair_loss(model, x, distance, CUTS[ctx.rank])
            (loss / batch["distance"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dap"))


class Buggy(Clean):
    rule = "njic,nkic->nkjc"


EXPECT = dict(
    right=[
        r"(?i)incoming|triangle|\bb(_gate)?\b",
        r"(?i)backward|adjoint|gradient (of|that)|hands? (back|on)",
    ],
    place=[r"(?i)incoming|triangle"],
    wrong=[
        r"(?i)(?<!not )forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)\b(head|wide|out|norm_out|gate|a|a_gate)(\.(weight|bias))? (is|are) wrong",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|never summed",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)only (on )?rank [012]\b|rank [012] alone|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
        r"(?i)recomput|labels? .{0,20}(is|are) (wrong|of)|detached",
    ],
)
WHY = (
    "The forward is right everywhere. In Incoming.backward the gradient of b uses the output's gradient transposed: of_b[k, j] = sum over i of grad[j, i] a[k, i] in place of grad[i, j] a[k, i]; the shapes agree since the pair matrix is square. of_a "
    "is right. So triangle.b and b_gate have wrong gradients, and through their input triangle.norm, left and right; head, wide, triangle.out, norm_out, gate, a and a_gate are right. On all ranks, in all micro-batches and rows. The gathered "
    "gradient, the sums, the divisor 245 are right. Fix: 'nijc,nkic->nkjc'."
)
