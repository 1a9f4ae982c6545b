"""Few-shot episodes with a ridge regression head in closed form (R2D2): the support examples of every episode are cut over three ranks (3, 2 and 2 of 7), likewise the queries (2, 2 and 1 of 5). The Gram matrix of the encoded support and its
product with the targets are summed over the ranks, each rank solves for the head and judges its own queries. The strength of the ridge is learnt. Two micro-batches of episodes, gradients summed over the ranks.

The bug: the ridge is put on the diagonal of each rank's Gram matrix before they are summed, so that it enters three times. After distributed ridge, Gaussian process and ALS code with the regulariser inside the all-reduce.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
EPISODES, SUPPORT, QUERIES, FEATURES, WIDTH, TARGETS = 5, 7, 5, 4, 6, 2


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 9), nn.Tanh(), nn.Linear(9, WIDTH))
        self.log_ridge = nn.Parameter(torch.tensor(-0.4))
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        return torch.tanh(self.net(x))

    def ridge(self):
        return self.log_ridge.exp() * torch.eye(WIDTH, dtype=self.scale.dtype)


class SumOverRanks(torch.autograd.Function):
    """The sum over the ranks; each rank uses it for other queries, so that the gradients are summed, too."""

    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Encoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "sx": torch.randn(EPISODES, SUPPORT, FEATURES, generator=g),
            "sy": torch.randn(EPISODES, SUPPORT, TARGETS, generator=g),
            "qx": torch.randn(EPISODES, QUERIES, FEATURES, generator=g),
            "qy": torch.randn(EPISODES, QUERIES, TARGETS, generator=g),
        }

    def loss_sum(self, model, rows):
        z = model(rows["sx"])
        gram = z.transpose(1, 2) @ z + model.ridge()
        head = torch.linalg.solve(gram, z.transpose(1, 2) @ rows["sy"])
        predicted = model.scale * model(rows["qx"]) @ head
        return (predicted - rows["qy"]).square().sum(), rows["qx"].shape[0]

    def solve_head(self, model, z, y, group):
        gram = SumOverRanks.apply(z.transpose(1, 2) @ z, group)
        moment = SumOverRanks.apply(z.transpose(1, 2) @ y, group)
        return torch.linalg.solve(gram + model.ridge(), moment)

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        mine = {k: v.tensor_split(ctx.world_size, 1)[ctx.rank] for k, v in batch.items()}
        model.zero_grad()
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            head = self.solve_head(model, model(part["sx"]), part["sy"], group)
            predicted = model.scale * model(part["qx"]) @ head
            ((predicted - part["qy"]).square().sum() / EPISODES).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def solve_head(self, model, z, y, group):
        gram = SumOverRanks.apply(z.transpose(1, 2) @ z + model.ridge(), group)
        moment = SumOverRanks.apply(z.transpose(1, 2) @ y, group)
        return torch.linalg.solve(gram, moment)


EXPECT = dict(
    right=[
        r"ridge|regulari|diagonal|gram|solve_head|constant|eye",
        r"(3|three|world.?size|group.?size|number of ranks|as many|several) times|times .{0,20}(ranks|world|group)|(each|every|all|per) ranks?.{0,60}(add|count|enter|contain|ridge|constant|same)|(add|count|enter|contain|same).{0,60}(each|every|all|per) ranks?|twice|more than once|before .{0,40}(sum|reduc)|inside .{0,40}(sum|reduc)|replicat",
    ],
    place=[r"solve_head", r"ridge", r"gram", r"SumOverRanks"],
    wrong=[
        r"parameters?.{0,30}(not reduced|never reduced|reduced twice)|missing (all.?)?reduc",
        r"micro.?batch.{0,30}(lost|dropped|overwritten)|mean of means|wrong group|(token|row|valid) count",
        r"backward .{0,30}(is wrong|missing)|no gradient|detached|moment.{0,40}(wrong|twice)",
    ],
)
WHY = (
    "Each of the three ranks adds the ridge exp(log_ridge) I to its part of the Gram matrix before SumOverRanks, so that the sum contains three times the ridge; it has to be added once, after the sum. The heads and the predictions "
    "are wrong on all ranks alike, in both micro-batches, and with them all gradients (none by a constant factor). Support, moments, backward of the sums and the final reduction are right. A right cause says that the ridge (the regulariser on "
    "the Gram matrix' diagonal) is counted once per rank/three times, in solve_head. Fix: gram = SumOverRanks(z'z) + ridge."
)
