"""Point pillars (lidar points, averaged per pillar), hybrid sharded data parallel: FSDP2 on a mesh
of 2 x 2.

Each point goes through a small network, the points of a pillar are averaged, the pillars go
through a second network and an occupied-pillar mean gives the score of the scene. A rank puts the
pillars of its scenes one behind the other and averages with one scatter.

The bug: ``scatter_reduce(..., "mean")`` on a buffer of zeros has ``include_self=True`` by
default, which counts the zero that lies in the buffer as one more point of each pillar. After
pooling layers moved from torch_scatter's scatter_mean to torch's own scatter_reduce.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

TOPOLOGY = {"pools": {"train": {"axes": {"replica": 2, "shard": 2}}}}

ROWS, POINTS, PILLARS = 9, 11, 5


class Pillars(nn.Module):
    def __init__(self):
        super().__init__()
        self.point = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5))
        self.pillar = nn.Sequential(nn.Linear(5, 9), nn.GELU())
        self.score = nn.Linear(9, 1)

    def pool(self, x, index, pillars):
        member = nn.functional.one_hot(index, pillars).to(x.dtype)
        return (member.t() @ x) / member.sum(0).clamp(min=1)[:, None]

    def forward(self, points, pillar):
        scenes = points.shape[0]
        index = (pillar + torch.arange(scenes)[:, None] * PILLARS).flatten()
        x = self.point(points).flatten(0, 1)
        x = self.pool(x, index, scenes * PILLARS)
        occupied = (
            torch.zeros(scenes * PILLARS, dtype=x.dtype)
            .index_fill(0, index, 1.0)
            .view(scenes, PILLARS, 1)
        )
        x = self.pillar(x).view(scenes, PILLARS, -1)
        return self.score((x * occupied).sum(1) / occupied.sum(1)).squeeze(-1)


class ScatterPillars(Pillars):
    def pool(self, x, index, pillars):
        out = x.new_zeros(pillars, x.shape[1])
        return out.scatter_reduce(0, index[:, None].expand_as(x), x, "mean", include_self=False)


class FusedPillars(Pillars):
    def pool(self, x, index, pillars):
        out = x.new_zeros(pillars, x.shape[1])
        return out.scatter_reduce(0, index[:, None].expand_as(x), x, "mean")


class Clean:
    parallel_class = ScatterPillars

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(17 + self.seed)
        return Pillars()

    def batch(self):
        g = torch.Generator().manual_seed(18 + self.seed)
        return {
            "points": torch.randn(ROWS, POINTS, 4, generator=g),
            "pillar": torch.randint(0, PILLARS, (ROWS, POINTS), generator=g),
            "occupied": torch.randint(0, 2, (ROWS,), generator=g).float(),
        }

    def loss_sum(self, model, rows):
        out = model(rows["points"], rows["pillar"])
        loss = nn.functional.binary_cross_entropy_with_logits(
            out, rows["occupied"], reduction="sum"
        )
        return loss, rows["occupied"].shape[0]

    def distribute(self, model, ctx):
        model.__class__ = self.parallel_class
        mesh = ctx.mesh["replica", "shard"]
        fully_shard(model.point, mesh=mesh)
        fully_shard(model.pillar, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def step(self, model, batch, ctx):
        world = dist.get_world_size(ctx.group("replica", "shard"))
        rank = ctx.coords["replica"] * 2 + ctx.coords["shard"]
        mine = {k: torch.tensor_split(v, world)[rank] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss * world / ROWS).backward()


class Buggy(Clean):
    parallel_class = FusedPillars


EXPECT = dict(
    right=[
        r"scatter_reduce|include_self|scatter|mean over (the )?points|pillar mean|pool",
        (
            r"include_self|count.{0,40}(zero|initial|one (more|too many|extra)|itself|buffer)|n "
            r"?\+ ?1|count ?\+ ?1|one (more|too many|extra)|too many by one|extra "
            r"(zero|element|point|member)"
        ),
    ],
    place=[r"FusedPillars", r"\bpool\b", r"scatter_reduce", r"include_self"],
    wrong=[
        r"replica|hsdp|world size|reduce[- ]scatter|divide factor",
        r"empty pillars|unoccupied",
        r"index (is )?offset|pillars of other scenes|other scene",
        r"uneven (rows|split)",
    ],
)

WHY = (
    "scatter_reduce with reduce='mean' counts the value that lies in the output buffer as a "
    "member unless include_self=False is given, so a pillar of n points is divided by n + 1 "
    "and its mean is too small by n / (n + 1). The pooled features change by another factor "
    "in each pillar, so the gradients of the point network are wrong and by the changed "
    "activations those of the pillar network and the score layer too; nothing is wrong with "
    "the reduction over replica and shard. A right cause says that the mean over a pillar's "
    "points includes the initial zero (one too many in the divisor, include_self). The fix "
    "is include_self=False."
)
