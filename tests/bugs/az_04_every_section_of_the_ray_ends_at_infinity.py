"""Volume rendering of rays cut in depth over three ranks (sections of 3, 2 and 4 of nine samples): every rank evaluates the field at its samples, sums colour and transmittance of its section, and the sections are composited from front to
back after a gather whose backward hands every section its own gradient once (all ranks have the same loss). The last sample of a ray is infinitely thick (a sky behind it). Two micro-batches of rays.

The bug: the thickness of a section's last sample is set to infinity by every rank, by the usual line of raw2outputs, though only the last section ends at the sky; the first two are opaque at their end. See bmild/nerf issue 61 (last
integration time is infinity in raw2alpha) and tancik/learnit issue 4 on what that last distance does.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"depth": 3}}}}
RAYS, SAMPLES, WIDTH = 7, 9, 8
SECTIONS = [3, 2, 4]
PARTS = [slice(0, 4), slice(4, 7)]
FAR = 1e10


class Sections(torch.autograd.Function):
    """All sections' results, front first; backward: the own section's gradient of all ranks.

    All ranks compute the same loss, so every rank's gradient is taken once, not summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, grad):
        return grad[dist.get_rank(ctx.group)], None


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.density, self.colour = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 3)
        self.group, self.sky_for_all = None, False

    def forward(self, x):
        h = torch.tanh(self.second(torch.sin(self.first(x))))
        return F.softplus(self.density(h)[..., 0] - 0.5), torch.sigmoid(self.colour(h))


def section(model, origin, direction, depth, thickness):
    """Colour (premultiplied) and transmittance of samples in order of depth."""
    points = origin[:, None] + depth[..., None] * direction[:, None]
    density, colour = model(points)
    through = torch.exp(-density * thickness)
    before = torch.cumprod(torch.cat([torch.ones_like(through[:, :1]), through], 1), 1)
    seen = ((before[:, :-1] * (1 - through))[..., None] * colour).sum(1)
    return torch.cat([seen, before[:, -1:]], 1)


def composite(parts):
    colour, clear = 0, 1
    for part in parts:
        colour, clear = colour + clear * part[:, :3], clear * part[:, 3:]
    return colour


def thickness_of(depth):
    last = torch.full_like(depth[:, :1], FAR)
    return torch.cat([depth[:, 1:] - depth[:, :-1], last], 1)


class Clean:
    sky_for_all = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Field()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "origin": torch.randn(RAYS, 3, generator=g),
            "direction": F.normalize(torch.randn(RAYS, 3, generator=g), dim=1),
            "depth": torch.rand(RAYS, SAMPLES, generator=g).add(0.1).cumsum(1) * 0.5,
            "pixel": torch.rand(RAYS, 3, generator=g),
        }

    def loss_sum(self, model, rows):
        seen = section(
            model, rows["origin"], rows["direction"], rows["depth"], thickness_of(rows["depth"])
        )
        return ((seen[:, :3] - rows["pixel"]) ** 2).sum(), len(rows["pixel"])

    def step(self, model, batch, ctx):
        group = ctx.group("depth")
        first = sum(SECTIONS[: ctx.rank])
        own = slice(first, first + SECTIONS[ctx.rank])
        for part in PARTS:
            rows = {k: v[part] for k, v in batch.items()}
            depth = rows["depth"][:, own]
            if self.sky_for_all:
                thickness = thickness_of(depth)
            else:
                thickness = thickness_of(rows["depth"])[:, own]
            mine = section(model, rows["origin"], rows["direction"], depth, thickness)
            seen = composite(Sections.apply(mine, group))
            (((seen - rows["pixel"]) ** 2).sum() / RAYS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    sky_for_all = True


EXPECT = dict(
    right=[
        r"(?i)forward|loss|thick|distance|section|transmittance|opaque|sample|composit|render",
        r"(?i)ranks? 0.{0,12}1\b|not (on )?(rank 2|the last)|but (not )?(the last|rank 2)|"
        r"every (rank|section)|"
        r"all (ranks|sections)|each (rank|section)|last sample|boundary|end of",
        r"(?i)thick|distance|interval|infinit|opaque|section|loss|outside the modules?|after the "
        r"modules|density|transmittance|weights? of the (loss|samples?)",
    ],
    place=[r"(?i)section|thickness|density|composit|loss|transmittance|render"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) twice",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|missing)|"
        r"only the last micro.?batch",
        r"(?i)(first|second|density|colour)\b.{0,25}forward.{0,20}(goes|is) wrong",
        r"(?i)gather.{0,30}(detached|without gradient|adjoint is wrong)",
        r"(?i)only (on )?rank [012]\b|rank 2 alone",
    ],
)
WHY = (
    "The field's modules see right points and give right densities and colours on all ranks. In `section` the thickness of the own last sample is 1e10 on every rank: right on rank 2 (sample 8, the sky), wrong on rank 0 (sample 2) and "
    "rank 1 (sample 4), where it should be the distance to the next section's first sample. So the sections of ranks 0 and 1 end opaque, their transmittance is 0, and after compositing nothing of ranks 1 and 2 is seen: their "
    "gradients vanish, and rank 0's last sample gets all the remaining weight. The loss, equal on all ranks, is wrong, for all rays and both micro-batches, and so are the gradients of all parameters. The gather and its adjoint, "
    "compositing, divisor 7 and the sum over the ranks are right. Fix: cut the thickness out of the whole ray's (or pass on the next section's first depth) and set infinity only behind the last rank."
)
