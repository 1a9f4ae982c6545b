"""The critic's step of a GAN with hinge losses: a spectrally normalised MLP on real rows and on
generated rows (given in the batch). Every layer divides its weight by an estimate of the largest
singular value, made by one turn of the power iteration from the stored vector u. FSDP2
(fully_shard) over two ranks with 4 and 3 of 7 rows, micro-batches of two.

In the objective the turn starts from u as it is at the beginning of the step.

Bug: the layer on the ranks writes the turned vector back into the buffer u, as torch's
spectral_norm does in training mode at every forward, so that each micro-batch (and the generated
rows after the real ones) uses an estimate which is one turn further. After GAN trainers to which
gradient accumulation was added.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, FEATURES, HIDDEN = 7, 5, 9


def turn(layer):
    with torch.no_grad():
        v = F.normalize(layer.weight.t() @ layer.u, dim=0)
        u = F.normalize(layer.weight @ v, dim=0)
    return u, v


def turn_and_keep(layer):
    with torch.no_grad():
        v = F.normalize(layer.weight.t() @ layer.u, dim=0)
        layer.u.copy_(F.normalize(layer.weight @ v, dim=0))
    return layer.u.clone(), v


class SpectralLinear(nn.Module):
    def __init__(self, wide, out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, wide) * wide**-0.5)
        self.bias = nn.Parameter(torch.randn(out) * 0.2)
        self.register_buffer("u", F.normalize(torch.randn(out), dim=0))

    def forward(self, x, estimate=turn):
        u, v = estimate(self)
        return F.linear(x, self.weight / (u @ self.weight @ v), self.bias)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [
                SpectralLinear(FEATURES, HIDDEN),
                SpectralLinear(HIDDEN, HIDDEN),
                SpectralLinear(HIDDEN, 1),
            ]
        )

    def forward(self, x, estimate=turn):
        for layer in self.layers[:-1]:
            x = F.leaky_relu(layer(x, estimate), 0.2)
        return self.layers[-1](x, estimate)[:, 0]


class Clean:
    estimate = staticmethod(turn)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 5)
        return Critic()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 50)
        return {
            "real": 1.5 * torch.randn(ROWS, FEATURES, generator=g) + 0.5,
            "fake": torch.randn(ROWS, FEATURES, generator=g),
        }

    def hinge(self, real, fake):
        return F.relu(1 - real).sum() + F.relu(1 + fake).sum()

    def loss_sum(self, model, rows):
        return self.hinge(model(rows["real"]), model(rows["fake"])), rows["real"].shape[0]

    def distribute(self, model, ctx):
        mesh = init_device_mesh("cpu", (ctx.axes["dp"],), mesh_dim_names=("dp",))
        return fully_shard(model, mesh=mesh)

    def step(self, model, batch, ctx):
        dp = ctx.axes["dp"]
        own = torch.arange(ROWS).tensor_split(dp)[ctx.coords["dp"]]
        for rows in own.split(2):
            real = model(batch["real"][rows], self.estimate)
            fake = model(batch["fake"][rows], self.estimate)
            (self.hinge(real, fake) * dp / ROWS).backward()


class Buggy(Clean):
    estimate = staticmethod(turn_and_keep)


EXPECT = dict(
    right=[
        r"power.?iteration|spectral|\bu\b|buffer|singular|sigma|turn_and_keep|state",
        r"updat|writ|chang|advanc|mutat|modif|in.?place|copy_|carr(y|ied)|moves|drift|every "
        r"(forward|call)|each (forward|micro|call)|differs? (from|between)",
    ],
    place=[r"turn_and_keep", r"\bestimate\b", r"layers\.\d\.u", r"layer\.u", r"\bbuffers?\b"],
    wrong=[
        r"(missing|not|never|twice).{0,20}(all.?reduc|reduce.?scatter)",
        r"uneven.{0,40}rows",
        r"(micro.?batch|rank).{0,30}(mean of means|averag)",
        r"sigma.{0,30}(detach|no.?grad)\w*.{0,20}(wrong|miss)",
        r"hinge.{0,30}(wrong|sign)",
        r"buffer.{0,40}(not )?(broadcast|synchroni)",
    ],
)
WHY = """turn_and_keep writes the result of the power iteration into the buffer u at each forward.
The objective makes one turn from the u with which the step began; on the ranks only the first
forward (real rows of the first micro-batch) does, all others start from a vector that has already
been turned, and divide by another estimate of sigma. So all weights' gradients differ, and u itself
is moved on. Fix: do not write u inside the forward (turn it once per step)."""
