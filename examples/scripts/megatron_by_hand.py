"""Tensor parallelism written by hand, as Megatron has it: weights cut, two autograd functions."""

import argparse

import torch
import torch.distributed as dist
from net import VOCABULARY, WIDTH, batch_of, loss_of
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--bug", default="")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def summed(x):
    x = x.contiguous().clone()
    dist.all_reduce(x)
    return x


class Enter(torch.autograd.Function):
    """The same on every rank forward; every rank's part of the gradient back."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad if args.bug == "gradient not reduced" else summed(grad)


class Leave(torch.autograd.Function):
    """Every rank's part forward; the gradient as it is back."""

    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, grad):
        return summed(grad) if args.bug == "gradient reduced again" else grad


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def cut(self):
        """Keep this rank's rows of the first weight, and columns of the second."""
        own = [t.tensor_split(world)[rank] for t in (self.up.weight, self.up.bias)]
        self.up.weight, self.up.bias = (nn.Parameter(t.detach().clone()) for t in own)
        columns = self.down.weight.tensor_split(world, dim=1)[rank]
        self.down.weight = nn.Parameter(columns.detach().clone())

    def forward(self, x):
        y = Leave.apply(F.linear(F.gelu(self.up(Enter.apply(x))), self.down.weight))
        return y + self.down.bias * (world if args.bug == "bias on every rank" else 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mlps = nn.ModuleList(MLP() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            x = x + mlp(norm(x))
        return self.head(x)


torch.manual_seed(args.seed)
net = Net()
for mlp in net.mlps:
    mlp.cut()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    ids, targets = batch_of(args.seed, step, rows=5)
    loss_of(net(ids), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
