"""Energy-based model over two data replicas, three micro-batches each, gradients reduced by
hand.

A convolutional energy E(x) is trained by contrastive divergence: the negatives start at noise
that comes with the rows and walk a few Langevin steps down the energy; the loss is E(x) -
E(x_neg) and a small penalty on both. The gradients are added up over the micro-batches and summed
over the replicas.

The bug: the sampler takes its slope with energy.sum().backward() and reads x.grad. After the kind
of code of many short EBM scripts (sampler loops written for evaluation, where nobody looks at the
weights' gradients), moved from before zero_grad into the accumulation loop.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}

ROWS, SIDE, WALK, RATE = 9, 5, 3, 0.15
WIDTH = 7


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.conv2 = nn.Conv2d(WIDTH, 5, 3, stride=2, padding=1)
        self.out = nn.Linear(5 * 9, 1)

    def forward(self, x):
        h = nn.functional.silu(self.conv1(x))
        h = nn.functional.silu(self.conv2(h))
        return self.out(h.flatten(1)).squeeze(1)


def langevin(energy, start, kicks):
    """Walks down the energy; returns samples without a graph."""
    x = start.detach()
    for kick in kicks.unbind(1):
        x = x.detach().requires_grad_(True)
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(energy(x).sum(), x)
        x = x.detach() - RATE * slope + 0.1 * kick
    return x.detach()


def langevin_leaf(energy, start, kicks):
    """Walks down the energy; returns samples without a graph."""
    x = start.detach().clone().requires_grad_(True)
    for kick in kicks.unbind(1):
        if x.grad is not None:
            x.grad.zero_()
        with torch.enable_grad():
            energy(x).sum().backward()
        with torch.no_grad():
            x.sub_(RATE * x.grad).add_(0.1 * kick)
    return x.detach()


class Clean:
    sampler = staticmethod(langevin)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 11)
        return Energy()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 12)
        return {
            "image": torch.randn(ROWS, 1, SIDE, SIDE, generator=g),
            "start": torch.rand(ROWS, 1, SIDE, SIDE, generator=g) * 2 - 1,
            "kicks": torch.randn(ROWS, WALK, 1, SIDE, SIDE, generator=g),
        }

    def contrast(self, model, rows, sampler):
        negative = sampler(model, rows["start"], rows["kicks"])
        real, fake = model(rows["image"]), model(negative)
        return (real - fake + 0.1 * (real.square() + fake.square())).sum()

    def loss_sum(self, model, rows):
        return self.contrast(model, rows, langevin), len(rows["image"])

    def step(self, model, batch, ctx):
        own = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        pieces = min(3, len(own["image"]))
        for index in range(pieces):
            piece = {k: v.tensor_split(pieces)[index] for k, v in own.items()}
            loss = self.contrast(model, piece, self.sampler) / len(batch["image"])
            loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    sampler = staticmethod(langevin_leaf)


EXPECT = dict(
    right=[
        r"sampl|langevin|negativ|mcmc|walk",
        (
            r"backward|accumulat|pollut|leak|left (over|in|behind)|add(s|ed)? (in)?to|\.grad|"
            r"not (zeroed|cleared)|extra (gradient|contribution)"
        ),
    ],
    place=[r"langevin", r"sampler", r"energy\(x\)\.sum\(\)\.backward", r"contrast", r"negative"],
    wrong=[
        r"divided (twice|by the number of micro)",
        r"(missing|lacks|without) (an? )?all.?reduce",
        r"samples? (keep|carry|retain)s? (their|its|the) graph",
        r"noise (is )?drawn (per|by) rank",
    ],
)
WHY = (
    "langevin_leaf gets the slope with respect to x by energy(x).sum().backward(), which also "
    "adds dE/dw at every point of the walk into the .grad of every weight of the energy, "
    "between zero_grad and the reduction. These sums (not divided by the number of rows, not "
    "wanted at all) lie under the gradient of the loss of each micro-batch, so every parameter "
    "of Energy that the energy depends on is wrong; the output bias gets one per row and walk "
    "step. The samples themselves and the loss are right. A right cause says that the sampler's "
    "backward leaves its gradients in the parameters' .grad. The fix is "
    "torch.autograd.grad(energy, x), or freezing the weights during the walk."
)
