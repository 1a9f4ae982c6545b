"""Gaussian splatting with the Gaussians' projection cut over three ranks (as in Grendel-GS): every rank projects its share of the Gaussians into all views of the micro-batch, the projected splats are exchanged, and each rank renders
its own strip of pixel rows from all splats, front to back. Loss per view: squared error plus absolute error of the image. Two micro-batches of views, gradients summed over the ranks.

The bug: every rank sorts its own splats by depth before the exchange, and the joined list is blended as it lies: the splats of rank 0 come all before those of rank 1.
After the multi-GPU forks of gaussian-splatting/gsplat ("different image when Gaussians are sharded", sort before all-gather).
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"gs": 3}}}}
GAUSSIANS, VIEWS, HEIGHT, WIDTH = 11, 5, 8, 5


class Scene(nn.Module):
    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(GAUSSIANS, 3))
        self.log_scale = nn.Parameter(torch.randn(GAUSSIANS) * 0.3 - 0.3)
        self.opacity = nn.Parameter(torch.randn(GAUSSIANS) * 0.5 + 0.5)
        self.colour = nn.Parameter(torch.randn(GAUSSIANS, 3))
        self.view_colour = nn.Linear(3, 3)

    def project(self, camera, own):
        """(views, splats, 8): x, y, depth, width, opacity and colour in each camera."""
        seen = self.position[own] @ camera["turn"].transpose(1, 2)
        depth = seen[..., 2:] + 6
        place = seen[..., :2] * 6 / depth
        width = self.log_scale[own].exp()[:, None] * 6 / depth
        alpha = self.opacity[own].sigmoid()[:, None].expand_as(depth)
        colour = torch.sigmoid(self.colour[own] + self.view_colour(camera["turn"][:, None, 2]))
        return torch.cat([place, depth, width, alpha, colour], -1)


def blend(splats, lo, hi):
    """Splats in the order they come, front to back; pixel rows lo to hi."""
    y = torch.linspace(-1.5, 1.5, HEIGHT, dtype=splats.dtype)[lo:hi]
    x = torch.linspace(-1.5, 1.5, WIDTH, dtype=splats.dtype)
    at = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).flatten(0, 1)
    distance = (at[None, None] - splats[:, :, None, :2]).square().sum(-1)
    alpha = (
        0.95 * splats[:, :, None, 4] * torch.exp(-distance / (2 * splats[:, :, None, 3].square()))
    )
    behind = torch.cat([torch.ones_like(alpha[:, :1]), (1 - alpha).cumprod(1)[:, :-1]], 1)
    return torch.einsum("vsp,vsc->vpc", alpha * behind, splats[..., 5:]).unflatten(
        1, (hi - lo, WIDTH)
    )


def front_to_back(splats):
    order = splats[..., 2].argsort(1)
    return splats.gather(1, order[..., None].expand_as(splats))


class GatherSplats(torch.autograd.Function):
    @staticmethod
    def forward(fctx, own, lo, hi, group):
        fctx.place = lo, hi, group
        everything = own.new_zeros(own.shape[0], GAUSSIANS, own.shape[2])
        everything[:, lo:hi] = own
        dist.all_reduce(everything, group=group)
        return everything

    @staticmethod
    def backward(fctx, grad):
        lo, hi, group = fctx.place
        grad = grad.clone()
        dist.all_reduce(grad, group=group)
        return grad[:, lo:hi], None, None, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Scene()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        turn = torch.linalg.qr(torch.randn(VIEWS, 3, 3, generator=g))[0]
        return {"turn": turn, "image": torch.rand(VIEWS, HEIGHT, WIDTH, 3, generator=g)}

    @staticmethod
    def image_error(image, truth):
        d = image - truth
        return (d.square() + 0.2 * (d.square() + 1e-4).sqrt()).sum() / (HEIGHT * WIDTH)

    def loss_sum(self, model, rows):
        splats = front_to_back(model.project(rows, slice(0, GAUSSIANS)))
        return self.image_error(blend(splats, 0, HEIGHT), rows["image"]), len(rows["image"])

    def exchange(self, own, lo, hi, group):
        return front_to_back(GatherSplats.apply(own, lo, hi, group))

    def step(self, model, batch, ctx):
        group, world = ctx.group("gs"), ctx.world_size
        lo, hi = GAUSSIANS * ctx.rank // world, GAUSSIANS * (ctx.rank + 1) // world
        top, bottom = HEIGHT * ctx.rank // world, HEIGHT * (ctx.rank + 1) // world
        for p in model.parameters():
            p.grad = None
        for m in range(2):
            part = {k: v.tensor_split(2)[m] for k, v in batch.items()}
            splats = self.exchange(model.project(part, slice(lo, hi)), lo, hi, group)
            image = blend(splats, top, bottom)
            (self.image_error(image, part["image"][:, top:bottom]) / VIEWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def exchange(self, own, lo, hi, group):
        return GatherSplats.apply(front_to_back(own), lo, hi, group)


EXPECT = dict(
    right=[
        r"sort|order|depth|permut|front.?to.?back|arrang",
        r"own|local|before|each rank|every rank|per.?rank|shard|exchange|gather|global|whole|joined|all splats",
    ],
    place=[
        r"exchange",
        r"front_to_back",
        r"argsort|\bsort",
        r"GatherSplats",
        r"blend|cumprod",
        r"splats",
    ],
    wrong=[
        r"(missing|lacks?|without|never|not) (all.?)?reduc|reduced twice|not reduced",
        r"GatherSplats.{0,50}(adjoint|backward).{0,30}(wrong|missing)|backward of the gather.{0,20}(wrong|missing)",
        r"divisor|mean of means|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"pixel rows?.{0,40}(wrong|shifted|from zero)|(wrong|other) rows",
    ],
)
WHY = (
    "Blending depends on the order: a splat is dimmed by all that lie in front of it. Each rank sorts its own three or four splats by depth and gathers them in the order of the ranks, and no rank sorts the joined list, so that all splats of rank 0 "
    "lie in front of rank 1's and these in front of rank 2's. The image of all three strips is another, in each micro-batch, and so all gradients are wrong on all ranks; the gather's adjoint, the final sum and the divisor are right. A "
    "right cause says that the depth order is of each rank's own splats instead of all. Fix: sort after the gather."
)
