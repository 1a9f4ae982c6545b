"""A small pair stack of a protein model: outgoing, then incoming triangle multiplication, then a distance class for every pair of residues. Two data ranks times two ranks that divide the pair matrix by its rows (dynamic axial
parallelism), two micro-batches of odd size. The incoming update needs columns: one of its two factors is gathered and cut by columns, the other is gathered whole. All gradients are summed over all four ranks; divisor: all pairs.

The bug: in the incoming update the two factors have changed places: b is cut by columns and a is gathered, so entry (i, j) is what entry (j, i) should be. The two letters in the incoming and the outgoing update of AlphaFold's
supplement (algorithms 11 and 12) as row-parallel code in the manner of FastFold and OpenFold; no issue number.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "dap": 2}}}}
RESIDUES, FEATURES, WIDTH, CLASSES, ROWS = 6, 3, 5, 4, 7
PARTS = [[(0, 1), (1, 4)], [(4, 6), (6, 7)]]


class Whole(torch.autograd.Function):
    """All rows of the pair matrix from the ranks' rows."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.rows = group, x.shape[1]
        pieces = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, x.contiguous(), group=group)
        return torch.cat(pieces, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        first = dist.get_rank(ctx.group) * ctx.rows
        return grad[:, first : first + ctx.rows], None


class Triangle(nn.Module):
    def __init__(self, incoming):
        super().__init__()
        self.incoming, self.group, self.by_column = incoming, None, "a"
        self.norm, self.norm_out = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.gate, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, z):
        x = self.norm(z)
        a, b = F.glu(self.a(x)), F.glu(self.b(x))
        if self.group is None:
            turn = "bkic,bkjc->bijc" if self.incoming else "bikc,bjkc->bijc"
            y = torch.einsum(turn, a, b)
        elif self.incoming:
            y = self.columns(a, b)
        else:
            y = torch.einsum("bikc,bjkc->bijc", a, Whole.apply(b, self.group))
        return z + torch.sigmoid(self.gate(x)) * self.out(self.norm_out(y))

    def columns(self, a, b):
        cut, kept = (a, b) if self.by_column == "a" else (b, a)
        first = dist.get_rank(self.group) * cut.shape[1]
        mine = Whole.apply(cut, self.group)[:, :, first : first + cut.shape[1]]
        return torch.einsum("bkic,bkjc->bijc", mine, Whole.apply(kept, self.group))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.outgoing, self.incoming = Triangle(False), Triangle(True)
        self.distance = nn.Linear(WIDTH, CLASSES)

    def forward(self, pairs):
        return self.distance(self.incoming(self.outgoing(self.enter(pairs))))


def pair_loss(model, pairs, classes):
    return F.cross_entropy(model(pairs).flatten(0, 2), classes.flatten(), reduction="sum")


class Clean:
    by_column = "a"

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        shape = (ROWS, RESIDUES, RESIDUES)
        return {
            "pairs": torch.randn(*shape, FEATURES, generator=g),
            "classes": torch.randint(CLASSES, shape, generator=g),
        }

    def loss_sum(self, model, rows):
        loss = pair_loss(model, rows["pairs"], rows["classes"])
        return loss, rows["classes"].numel()

    def distribute(self, model, ctx):
        for triangle in (model.outgoing, model.incoming):
            triangle.group, triangle.by_column = ctx.group("dap"), self.by_column
        return model

    def step(self, model, batch, ctx):
        model.zero_grad(set_to_none=True)
        group = ctx.group("dap")
        size = RESIDUES // dist.get_world_size(group)
        first = dist.get_rank(group) * size
        for low, high in PARTS[ctx.coords["dp"]]:
            pairs = batch["pairs"][low:high, first : first + size]
            classes = batch["classes"][low:high, first : first + size]
            (pair_loss(model, pairs, classes) / batch["classes"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)


class Buggy(Clean):
    by_column = "b"


EXPECT = dict(
    right=[
        r"(?i)incoming|columns|triangle",
        r"(?i)forward|output|value|transpos|swap|exchang|order|operand|einsum|permut|computes",
    ],
    place=[r"(?i)incoming|columns|norm_out"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|wrong group",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[234]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the (last|first) micro.?batch",
        r"(?i)outgoing\S* .{0,25}(goes|is) wrong in the forward|forward goes wrong (first )?(at|in) (the )?(outgoing|enter)",
        r"(?i)only (on )?rank [0-3]\b|rank [0-3] alone",
        r"(?i)labels? .{0,20}(is|are) wrong|detach|recomput|dropout|forward is right",
    ],
)
WHY = (
    "The forward goes wrong in `incoming` (Triangle.columns), on all four ranks, all rows and micro-batches: the product must be y[i, j] = sum_k a[k, i] b[k, j]; with by_column = 'b' the factor b is cut by columns and a is gathered: "
    "y[i, j] = sum_k b[k, i] a[k, j], i.e. the right matrix transposed in its two residue axes. `a`, `b`, `norm` of incoming and all of outgoing and enter compute right values. All gradients but possibly small parts are wrong "
    "(distance, incoming, outgoing, enter), as activations and signals are wrong. Gather, its backward, the sum over four ranks, divisor 252 are right. Fix: cut a, gather b."
)
