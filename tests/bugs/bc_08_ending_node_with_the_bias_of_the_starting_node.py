"""The pair stack of a protein model on four ranks: two replicas, and rows of the pair representation dealt out over two ranks (3 and 2 of 5 residues) as in dynamic axial parallelism. Triangle attention around the starting node works on
the rows of a rank; around the ending node columns are fetched from the others, transposed, and attention runs over them. Each attention takes a bias from the pairs, gathered from all ranks. Two micro-batches; gradients are summed over
all ranks.

The bug: for the ending node, too, the bias is made from the rows as they lie (so that its gather can start early), and the gathered table is used as it is; there it has to be transposed. From the layout changes of hpcaitech/FastFold and
OpenFold (triangle attention around the ending node is that of the transposed pairs, bias and mask included; google-deepmind/alphafold issue 894 lists the shapes).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "dap": 2}}}}
RESIDUES, WIDTH, HEADS, BINS, KINDS, ROWS = 5, 8, 2, 4, 6, 6
CUTS = [slice(0, 3), slice(3, 5)]
PARTS = [[(0, 1), (1, 3)], [(3, 5), (5, 6)]]


class Whole(torch.autograd.Function):
    """The rows (dimension 1) of all ranks; backward sums and takes the own ones."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.own = group, CUTS[dist.get_rank(group)]
        out = x.new_zeros(x.shape[0], RESIDUES, *x.shape[2:])
        out[:, ctx.own] = x
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[:, ctx.own], None


class TriangleAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.bias, self.gate = nn.Linear(WIDTH, HEADS, bias=False), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, z, bias):
        """z: normed pairs (batch, lines, residues, width); bias: (batch, residues, residues, heads)."""
        q, k, v = (
            f(z).unflatten(-1, (HEADS, -1)).transpose(2, 3) for f in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(3, 4) * (WIDTH // HEADS) ** -0.5
        scores = scores + bias.permute(0, 3, 1, 2)[:, None]
        o = (scores.softmax(-1) @ v).transpose(2, 3).flatten(3)
        return self.out(o * self.gate(z).sigmoid())


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.starting, self.ending = TriangleAttention(), TriangleAttention()
        self.wide, self.narrow = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)

    def forward(self, z):
        x = self.starting.norm(z)
        z = z + self.starting(x, self.starting.bias(x))
        x = self.ending.norm(z).transpose(1, 2)
        z = z + self.ending(x, self.ending.bias(x)).transpose(1, 2)
        return z + self.narrow(F.relu(self.wide(z)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Embedding(KINDS, WIDTH), nn.Embedding(KINDS, WIDTH)
        self.apart = nn.Embedding(2 * RESIDUES - 1, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, BINS)

    def pairs(self, chain, own):
        place = torch.arange(RESIDUES)
        apart = self.apart(place[own, None] - place + RESIDUES - 1)
        return self.left(chain)[:, own, None] + self.right(chain)[:, None] + apart

    def forward(self, chain):
        z = self.pairs(chain, slice(None))
        for layer in self.layers:
            z = layer(z)
        return self.head(z)


class Clean:
    turn_bias = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        model = Net()
        with torch.no_grad():
            for layer in model.layers:
                layer.starting.bias.weight.mul_(4)
                layer.ending.bias.weight.mul_(4)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "chain": torch.randint(KINDS, (ROWS, RESIDUES), generator=g),
            "bins": torch.randint(BINS, (ROWS, RESIDUES, RESIDUES), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["chain"])
        return F.cross_entropy(logits.flatten(0, 2), rows["bins"].flatten(), reduction="sum"), rows[
            "bins"
        ].numel()

    def run_layer(self, layer, z, group, own):
        x = layer.starting.norm(z)
        z = z + layer.starting(x, Whole.apply(layer.starting.bias(x), group))
        x = layer.ending.norm(z)
        bias = Whole.apply(layer.ending.bias(x), group)
        if self.turn_bias:
            bias = bias.transpose(1, 2)
        lines = Whole.apply(x, group)[:, :, own].transpose(1, 2)
        update = Whole.apply(layer.ending(lines, bias), group)
        z = z + update[:, :, own].transpose(1, 2)
        return z + layer.narrow(F.relu(layer.wide(z)))

    def step(self, model, batch, ctx):
        model.zero_grad()
        group = ctx.group("dap")
        own = CUTS[dist.get_rank(group)]
        for low, high in PARTS[dist.get_rank(ctx.group("dp"))]:
            z = model.pairs(batch["chain"][low:high], own)
            for layer in model.layers:
                z = self.run_layer(layer, z, group, own)
            logits, bins = model.head(z), batch["bins"][low:high, own]
            loss = F.cross_entropy(logits.flatten(0, 2), bins.flatten(), reduction="sum")
            (loss / batch["bins"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    turn_bias = False


EXPECT = dict(
    right=[
        r"(?i)ending|bias",
        r"(?i)bias|transpos|other places|places|axes|swapp|order|permut|argument|scores|another",
        r"(?i)forward|goes wrong|argument|handed|other|another|places|what goes into|computes|order|transpos|scores",
    ],
    place=[r"(?i)layers\.0\.ending|ending|bias|scores|run_layer|Whole"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|sum over (dap|dp) .{0,20}missing",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|(labels?|bins) .{0,20}(is|are) (wrong|of)",
        r"(?i)only (on )?rank [0123]\b|rank [0123] alone",
        r"(?i)goes wrong in (layers\.0\.)?(starting|ending\.(q|k|v|norm))\b|starting .{0,20}(goes|is) wrong",
        r"(?i)backward of Whole is wrong|rows of (the )?other rank",
        r"(?i)the (query|key|value) .{0,20}(is|are) (wrong|transposed)",
    ],
)
WHY = (
    "In run_layer the bias of layer.ending is made from x with rows as they lie and gathered: table[i, k] = bias(x[i, k]). The attention around the ending node works on the transposed pairs, where the bias between query i and key k is that "
    "of pair (k, i); the transpose(1, 2) of the gathered table is left out. First wrong is layers.0.ending (its argument `bias`, what is added to the scores); layers.0.starting, the norm, the lines (x transposed), q, k, v and the bias values "
    "themselves are right, only in transposed places (the diagonal is right). On all ranks, rows and micro-batches, in both layers. All gradients come out wrong. Gathers, their backward, sums over dap and dp, divisor 150 are right. Fix: "
    "bias.transpose(1, 2)."
)
