"""Self-supervised pretraining with a sketched isotropic Gaussian regulariser (SIGReg, as in LeJEPA): two views of each row are encoded, the prediction loss is their squared distance, and the regulariser
projects the embeddings on random directions and compares the empirical characteristic function of ALL rows with that of a normal variable. Data parallel by hand on three ranks of unlike row numbers; the
sums of cosines and sines are all-reduced inside the graph, the gradients are summed over the ranks.

The bug: the directions are drawn from a generator that each rank seeds with its own number (seed + rank, as for augmentations), but the sums over the ranks only mean something if all ranks project on the same
directions. After LeJEPA's code, where the generator of the slices is seeded by the (synchronised) global step for this very reason, and the set_seed(seed + rank) of many training scripts.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, FEATURES, WIDTH, EMBEDDING, SLICES, KNOTS, WEIGHT = 11, 6, 9, 5, 7, 5, 3.0


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
        )
        self.projector = nn.Linear(WIDTH, EMBEDDING)

    def forward(self, x):
        return self.projector(torch.tanh(self.backbone(x)))


class SumOverRanks(torch.autograd.Function):
    """Sum over the ranks; what is made of it is the same on each, so that its gradient is whole already."""

    @staticmethod
    def forward(fctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


def draw_directions(seed, like):
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(EMBEDDING, SLICES, generator=g).to(like)
    return a / a.norm(dim=0)


def characteristic_sums(z, directions):
    t = torch.linspace(0.3, 2.3, KNOTS).to(z)
    phase = (z @ directions)[..., None] * t
    return torch.stack([phase.cos().sum(0), phase.sin().sum(0)])


def epps_pulley(sums, count):
    t = torch.linspace(0.3, 2.3, KNOTS).to(sums)
    normal = torch.exp(-t.square() / 2)
    cosine, sine = sums / count
    return WEIGHT * (((cosine - normal).square() + sine.square()) * normal).mean()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"prediction": self.loss_sum, "sigreg": (self.statistics, epps_pulley)}

    def build(self):
        torch.manual_seed(self.seed)
        return Encoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        x = torch.randn(ROWS, FEATURES, generator=g)
        return {"x": x, "view": x + 0.4 * torch.randn(ROWS, FEATURES, generator=g)}

    def loss_sum(self, model, rows):
        return (model(rows["x"]) - model(rows["view"])).square().sum(), len(rows["x"])

    def statistics(self, model, rows):
        z = model(rows["x"])
        return characteristic_sums(z, draw_directions(self.seed + 100, z))

    def slice_seed(self, ctx):
        return self.seed + 100

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        rows = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        z, view = model(rows["x"]), model(rows["view"])
        directions = draw_directions(self.slice_seed(ctx), z)
        sums = SumOverRanks.apply(characteristic_sums(z, directions), group)
        loss = (z - view).square().sum() / ROWS + epps_pulley(sums, ROWS)
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def slice_seed(self, ctx):
        return self.seed + 100 + ctx.rank


EXPECT = dict(
    right=[
        r"direction|slice|projection|random|generator|seed|rng|draw_directions|slice_seed",
        r"(each|every|its|own|per).{0,12}rank|rank.{0,40}(differ|unlike|other|own|seed)|differ.{0,60}(rank|across)|unlike|not the same|seed.{0,20}rank|different",
    ],
    place=[
        r"slice_seed",
        r"draw_directions",
        r"directions",
        r"characteristic_sums",
        r"manual_seed|generator|randn",
        r"SumOverRanks",
    ],
    wrong=[
        r"(divisor|denominator|count).{0,40}(wrong|own|local)|mean of means",
        r"backward of SumOverRanks.{0,40}(wrong|missing)|counted (three|3) times|reduced twice",
        r"wrong rows|rows.{0,30}(twice|missing|dropped)",
        r"not reduced|never reduced|missing (all.?)?reduc",
    ],
)
WHY = (
    "The cosine and sine sums of the three ranks are added, but ranks 1 and 2 project their rows on directions from a generator seeded with seed + 100 + rank, so that slice k of the sum mixes projections on "
    "three unlike directions. The statistic, and with it the gradient of the regulariser, is wrong on all ranks (the prediction term is right, the reductions and divisors are right). "
    "A right cause says that the random directions (the generator's seed, slice_seed/draw_directions) differ between the ranks although they have to be the same. Fix: seed by what all ranks share."
)
