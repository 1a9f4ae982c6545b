"""A two-layer GraphSAGE on one feature set per row and a fixed graph of eleven nodes, which are cut over three ranks (4, 4 and 3). A rank owns the edges that end in its nodes; before each layer the features of all nodes are gathered, and
every node takes the mean over its incoming edges. Two micro-batches, gradients summed over the ranks.

The bug: the mean is taken by scatter_reduce_ into a buffer of zeros, whose include_self is True by default, so that the zero that was there counts as one more neighbour. After the reports on torch.scatter_reduce versus torch_scatter
(pytorch's docs on include_self, PyG's migration to it).
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"nodes": 3}}}}
ROWS, NODES, INPUT, WIDTH, MICRO = 6, 11, 4, 6, 2
SOURCE = torch.tensor([1, 4, 7, 0, 9, 3, 2, 10, 5, 8, 6, 0, 1, 3, 7, 2, 9, 4, 10, 6, 8, 5, 1, 2])
TARGET = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 4, 4, 4, 4, 5, 5, 6, 7, 7, 7, 8, 9, 9, 10, 10, 10])


class Layer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own = nn.Linear(inputs, outputs)
        self.neighbours = nn.Linear(inputs, outputs, bias=False)

    def forward(self, own, mean):
        return self.own(own) + self.neighbours(mean)


class Sage(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = Layer(INPUT, WIDTH)
        self.two = Layer(WIDTH, 1)

    def mean(self, x):
        weight = torch.zeros(NODES, NODES).index_put(
            (TARGET, SOURCE), torch.ones(()), accumulate=True
        )
        weight = weight.to(x)
        return (weight / weight.sum(1, keepdim=True)) @ x

    def forward(self, x):
        h = torch.tanh(self.one(x, self.mean(x)))
        return self.two(h, self.mean(h)).squeeze(-1)


class GatherNodes(torch.autograd.Function):
    """All nodes on each rank; every rank uses them for its own targets, so the gradients are summed."""

    @staticmethod
    def forward(fctx, own, lo, hi, group):
        fctx.place, fctx.group = (lo, hi), group
        full = own.new_zeros(own.shape[0], NODES, own.shape[2])
        full[:, lo:hi] = own
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(fctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad[:, slice(*fctx.place)], None, None, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Sage()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, NODES, INPUT, generator=g),
            "y": torch.randn(ROWS, NODES, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["x"]) - rows["y"]).square().sum(), len(rows["x"])

    def mean_of_incoming(self, messages, target, count):
        """messages: rows, edges, channels; target: the edges' ends among the own nodes."""
        index = target[None, :, None].expand_as(messages)
        out = messages.new_zeros(len(messages), count, messages.shape[-1])
        return out.scatter_reduce(1, index, messages, "mean", include_self=False)

    def layer(self, model, layer, own, lo, hi, group):
        every = GatherNodes.apply(own, lo, hi, group)
        mine = (lo <= TARGET) & (hi > TARGET)
        mean = self.mean_of_incoming(every[:, SOURCE[mine]], TARGET[mine] - lo, hi - lo)
        return layer(own, mean)

    def step(self, model, batch, ctx):
        own = torch.arange(NODES).tensor_split(ctx.axes["nodes"])[ctx.coords["nodes"]]
        lo, hi = int(own[0]), int(own[-1]) + 1
        group = ctx.group("nodes")
        for n in range(MICRO):
            x = batch["x"].tensor_split(MICRO)[n][:, lo:hi]
            y = batch["y"].tensor_split(MICRO)[n][:, lo:hi]
            h = torch.tanh(self.layer(model, model.one, x, lo, hi, group))
            out = self.layer(model, model.two, h, lo, hi, group).squeeze(-1)
            ((out - y).square().sum() / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def mean_of_incoming(self, messages, target, count):
        index = target[None, :, None].expand_as(messages)
        out = messages.new_zeros(len(messages), count, messages.shape[-1])
        return out.scatter_reduce_(1, index, messages, reduce="mean")


EXPECT = dict(
    right=[
        r"mean|averag|divid|divisor|count|denominator|degree",
        r"include_self|initial|zero|one (more|too many)|self|plus one|\+ ?1|too (small|large)|neighbou?r|incoming|edges|scatter|forward|messages",
    ],
    place=[r"mean_of_incoming", r"scatter_reduce", r"mean\b", r"neighbours?|aggregat"],
    wrong=[
        r"GatherNodes.{0,60}(backward|adjoint).{0,40}(wrong|missing|twice)|detached",
        r"(missing|no|never).{0,20}all.?reduce|not reduced|reduced twice|wrong group",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|mean of (the )?means|own (valid )?tokens|ranks?' own count",
        r"edges .{0,30}(of|on) other ranks .{0,30}(missing|lost)|self.?loops? (are|is) added",
    ],
)
WHY = (
    "scatter_reduce with 'mean' and the default include_self=True counts what the buffer held before, here a zero, as one more element. A node with d incoming edges gets the sum over d + 1 instead of d, on all three ranks, in both layers and both "
    "micro-batches; the edges themselves, the gather and the reduction are right. The forward is thus another one, and all gradients are wrong. A right cause says that the mean over the neighbours divides by one too many (the initial zero is "
    "included). Fix: include_self=False."
)
