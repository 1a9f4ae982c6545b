"""A graph network with several aggregators and degree scalers (after PNA: mean and deviation of the
messages, each as it is, amplified and attenuated by the logarithm of the degree) on five graphs of
six nodes and 11 edges. Edges of each graph are cut over gp (3): 4, 4 and 3; messages are summed
over gp, all nodes are updated on every rank. Micro-batches of two graphs.

Bug: the layer of the ranks puts the six parts together aggregator by aggregator (mean, amplified
mean, attenuated mean, deviation, ...) where the update's weight was laid out scaler by scaler (mean
and deviation plain, both amplified, both attenuated). After ports of PNA between libraries.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"gp": 3}}}}
GRAPHS, NODES, EDGES, FEATURES, WIDE, OUT = 5, 6, 11, 3, 5, 2
AVERAGE_LOG = 0.97


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


def scaled(parts, degree):
    log = (degree + 1).log()[..., None]
    parts = torch.cat(parts, -1)
    return torch.cat([parts, parts * (log / AVERAGE_LOG), parts * (AVERAGE_LOG / log)], -1)


def scaled_one_by_one(parts, degree):
    log = (degree + 1).log()[..., None]
    scales = [torch.ones_like(log), log / AVERAGE_LOG, AVERAGE_LOG / log]
    return torch.cat([part * scale for part in parts for scale in scales], -1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.message = nn.Linear(2 * WIDE, WIDE)
        self.update = nn.Linear(7 * WIDE, WIDE)
        self.group = None

    def forward(self, x, source, target, combine):
        near = x if self.group is None else Copy.apply(x, self.group)
        sent = torch.tanh(self.message(torch.cat([source @ near, target @ near], -1)))
        to_node = target.transpose(1, 2)
        sums = to_node @ torch.cat([sent, sent * sent, torch.ones_like(sent[..., :1])], -1)
        if self.group is not None:
            sums = Join.apply(sums, self.group)
        degree = sums[..., -1].clamp(min=1)
        mean, square = (sums[..., :-1] / degree[..., None]).split(WIDE, -1)
        deviation = ((square - mean * mean).clamp(min=0) + 0.01).sqrt()
        return x + self.update(torch.cat([x, combine([mean, deviation], degree)], -1)).tanh()


class Graphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDE)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.leave = nn.Linear(WIDE, OUT)

    def forward(self, x, edges, combine=scaled):
        eye = torch.eye(NODES, dtype=x.dtype)
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x, eye[edges[..., 0]], eye[edges[..., 1]], combine)
        return self.leave(x)


class Clean:
    combine = staticmethod(scaled)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 6)
        return Graphs()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 60)
        return {
            "x": torch.randn(GRAPHS, NODES, FEATURES, generator=g),
            "edges": torch.randint(0, NODES, (GRAPHS, EDGES, 2), generator=g),
            "y": torch.randn(GRAPHS, NODES, OUT, generator=g),
        }

    def loss_sum(self, model, rows):
        found = model(rows["x"], rows["edges"])
        return (found - rows["y"]).square().sum(), rows["y"].numel()

    def distribute(self, model, ctx):
        for layer in model.layers:
            layer.group = ctx.group("gp")
        return model

    def step(self, model, batch, ctx):
        own = torch.arange(EDGES).tensor_split(ctx.axes["gp"])[ctx.coords["gp"]]
        for rows in torch.arange(GRAPHS).split(2):
            found = model(batch["x"][rows], batch["edges"][rows][:, own], self.combine)
            ((found - batch["y"][rows]).square().sum() / batch["y"].numel()).backward()
        for layer in model.layers:
            for p in layer.message.parameters():
                dist.all_reduce(p.grad, group=ctx.group("gp"))


class Buggy(Clean):
    combine = staticmethod(scaled_one_by_one)


EXPECT = dict(
    right=[
        r"scale|aggregat|degree|deviation|amplif|attenuat|concat|torch\.cat|combine|update|feature|"
        r"column",
        r"order|interleav|permut|aggregator by aggregator|layout|arrang|rearrang|swap|transpos|"
        r"shuffl|sequence of|position of",
    ],
    place=[r"scaled_one_by_one", r"\bcombine\b", r"layers\.\d\.update", r"for part in parts"],
    wrong=[
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"(edge|degree).{0,30}(\bown\b|\blocal\b|partial|per.?rank)",
        r"\b(Copy|Join)\b.{0,40}(wrong|missing|adjoint)",
        r"message.{0,30}(not|missing).{0,10}(sum|reduc)",
        r"AVERAGE_LOG.{0,30}(wrong|missing)",
        r"variance.{0,30}(wrong|of means|unbiased)",
    ],
)
WHY = """update's weight expects x, then [mean, deviation] as they are, then both amplified, then
both attenuated. scaled_one_by_one loops over the aggregators outside and the scalers inside, so
that the blocks of WIDE columns come as mean, amplified mean, attenuated mean, deviation, ...: four
of six blocks meet the wrong columns of update.weight. Sums over gp are right; all gradients differ,
as the forward does. Fix: loop over scales outside (or concatenate parts first), as in scaled."""
