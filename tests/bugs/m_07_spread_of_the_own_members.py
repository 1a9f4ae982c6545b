"""A forecast ensemble with its members cut over ranks (and rows over `dp`), trained with the fair CRPS. After ecmwf/anemoi's and NVIDIA
makani's ensemble losses (members of one ensemble live on several ranks) and FAULTS C18 (a statistic of the shard): each rank takes the
spread of its own two members for that of the six.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "ens": 3}}}}
ROWS, MEMBERS, INPUTS, NOISE, WIDTH, OUTPUTS = 5, 6, 4, 3, 8, 3


class Members(torch.autograd.Function):
    """The members of all ranks of the group; every rank's loss uses them, so the gradients add up."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.size = group, x.shape[1]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[:, dist.get_rank(ctx.group) * ctx.size :][:, : ctx.size], None


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.state, self.noise = nn.Linear(INPUTS, WIDTH), nn.Linear(NOISE, 2 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.hidden, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x, z):
        scale, shift = self.noise(z).chunk(2, -1)
        x = self.norm(self.state(x))[:, None] * (1 + scale) + shift
        return self.out(x + F.gelu(self.hidden(x)))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Forecast()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "z": torch.randn(ROWS, MEMBERS, NOISE, generator=g),
            "y": torch.randn(ROWS, OUTPUTS, generator=g),
            "area": torch.rand(OUTPUTS, generator=g).expand(ROWS, OUTPUTS) + 0.5,
        }

    @staticmethod
    def crps(mine, everyone, rows):
        """The part of the fair CRPS that belongs to these members."""
        skill = (mine - rows["y"][:, None]).abs().sum(1) / MEMBERS
        apart = (mine[:, :, None] - everyone[:, None]).abs().sum((1, 2))
        spread = apart / (2 * MEMBERS * (everyone.shape[1] - 1))
        return ((skill - spread) * rows["area"]).sum()

    def loss_sum(self, model, rows):
        members = model(rows["x"], rows["z"])
        return self.crps(members, members, rows), len(rows["x"])

    def everyone(self, members, ctx):
        return Members.apply(members, ctx.group("ens"))

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        z = mine["z"].chunk(ctx.axes["ens"], dim=1)[ctx.coords["ens"]]
        members = model(mine["x"], z)
        (self.crps(members, self.everyone(members, ctx), mine) / ROWS).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def everyone(self, members, ctx):
        return members


EXPECT = dict(
    right=[
        r"loss|statistic|coupl|gather|members?|global|non.?additive|term|ens\b",
        r"own|local|shard|within|per.rank|across|every rank|ranks|differ|not .{0,30}(whole|global|shared)|share",
    ],
    place=[r"ens\b|member", r"loss", r"(all|every|each) (ranks?|param)"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"forward .{0,30}(is|was) wrong|first wrong .{0,20}(state|noise|norm|hidden|out)",
        r"(gradients?|param\w*) .{0,30}(averaged|divided) .{0,20}(instead|too often)",
        r"(rows?|micro-?batch(es)?) \S* ?(is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "The spread term of the fair CRPS compares each member with the other one of its own rank only (weight 1/(2*6*1)) instead of with "
    "all five others (1/(2*6*5)). Every rank's loss is wrong, so all gradients but that of out.bias (the spread does not depend on "
    "it) are wrong, equally on all ranks; the model's forward, the skill term and the reductions are right."
)
