"""Dilated convolutions over long recordings cut in three unequal parts; each rank borrows the neighbours' edges. After makani's and
NVIDIA PhysicsNeMo's halo exchanges and FAULTS C07's family (the adjoint of an exchange adds): the gradients of the borrowed edges come
back and are written over the gradients of the edges.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
ROWS, LENGTH, INPUTS, WIDTH, OUTPUTS = 5, 19, 3, 6, 2


def from_neighbours(first, last):
    """The left neighbour's `last` and the right neighbour's `first`; zeros at both ends."""
    me, size = dist.get_rank(), dist.get_world_size()
    edges = [torch.empty(2, *first.shape, dtype=first.dtype) for _ in range(size)]
    dist.all_gather(edges, torch.stack([first, last]))
    left = edges[me - 1][1] if me > 0 else torch.zeros_like(first)
    right = edges[me + 1][0] if me + 1 < size else torch.zeros_like(first)
    return left, right


def add_to_edge(edge, got):
    edge += got


def write_to_edge(edge, got):
    edge.copy_(got)


class Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, width, into_edge):
        ctx.width, ctx.into_edge = width, into_edge
        left, right = from_neighbours(x[..., :width], x[..., -width:])
        return torch.cat([left, x, right], -1)

    @staticmethod
    def backward(ctx, grad):
        width, me = ctx.width, dist.get_rank()
        mine = grad[..., width:-width].clone()
        left, right = from_neighbours(grad[..., :width], grad[..., -width:])
        if me > 0:
            ctx.into_edge(mine[..., :width], left)
        if me + 1 < dist.get_world_size():
            ctx.into_edge(mine[..., -width:], right)
        return mine, None, None


class Layer(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.dilation, self.norm = dilation, nn.LayerNorm(WIDTH)
        self.filter = nn.Conv1d(WIDTH, WIDTH, 3, dilation=dilation)
        self.gate = nn.Conv1d(WIDTH, WIDTH, 3, dilation=dilation)

    def forward(self, x, halo):
        y = halo(self.norm(x.mT).mT, self.dilation)
        return x + self.filter(y).tanh() * self.gate(y).sigmoid()


class WaveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(INPUTS, WIDTH, 1)
        self.layers = nn.ModuleList(Layer(d) for d in (1, 2, 3))
        self.last = nn.Conv1d(WIDTH, OUTPUTS, 1)

    def forward(self, x, halo=lambda x, width: F.pad(x, (width, width))):
        x = F.elu(self.first(x))
        for layer in self.layers:
            x = layer(x, halo)
        return self.last(x)


class Clean:
    into_edge = staticmethod(add_to_edge)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return WaveNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=g)
        lengths[1] = LENGTH
        return {
            "x": torch.randn(ROWS, INPUTS, LENGTH, generator=g),
            "y": torch.randn(ROWS, OUTPUTS, LENGTH, generator=g),
            "there": torch.arange(LENGTH).expand(ROWS, 1, LENGTH) < lengths[:, None],
        }

    @staticmethod
    def wave_loss(guess, rows):
        return (F.huber_loss(guess, rows["y"], reduction="none") * rows["there"]).sum()

    def loss_sum(self, model, rows):
        return self.wave_loss(model(rows["x"]), rows), rows["there"].sum()

    def step(self, model, batch, ctx):
        def halo(x, width):
            return Halo.apply(x, width, self.into_edge)

        mine = {k: v.tensor_split(ctx.world_size, dim=-1)[ctx.rank] for k, v in batch.items()}
        (self.wave_loss(model(mine["x"], halo), mine) / batch["there"].sum()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    into_edge = staticmethod(write_to_edge)


EXPECT = dict(
    right=[
        r"layers\.[0-2]|first|halo|edge|norm",
        r"backward|adjoint|gradient (of|into|entering|that|flow|at|with respect|of the input)|incoming|overwrit|lost|loses?|missing|"
        r"lacks?|halo|edge|border|boundar",
    ],
    place=[r"layers\.2", r"halo|edge|border|boundar", r"(all|every|each) ranks?|ranks? \W?[012]"],
    wrong=[
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"(last|layers\.2\.(filter|gate))\S* (is|are|has|have) (a )?wrong",
        r"mean of (the )?(rank |ranks' )?means",
        r"no_grad|detach",
    ],
)
WHY = (
    "In the backward of the halo exchange the neighbours' gradients replace those that the rank itself computed for its edge "
    "positions, so the gradient of the input of every halo exchange lacks the own part "
    "at the inner borders, on all ranks. The forward, last and the convolutions of layers.2 are right; layers.2.norm, layers.0, "
    "layers.1 and first are wrong."
)
