"""A pose network whose heat maps are cut into strips of rows over 3 ranks (3, 2 and 2 rows); joints
are read by a soft-argmax over the whole map, a hand-written Function with collectives.

The bug: the derivative of an expected coordinate with respect to a score is p * (y - E[y]). The
Function keeps for its backward the strip's contribution to the expectation, from before the
all-reduce, not the sum over strips. After integral human pose regression (Sun et al.) with split
maps, and the habit of saving the local variable of two that are named alike, as in reviews of
sequence parallel softmax kernels.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"strip": 3}}}}
HEIGHT, WIDTH, JOINTS = 7, 5, 3


def softmax_of_strips(scores, group):
    top = scores.amax((2, 3), keepdim=True)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    mass = (scores - top).exp()
    total = mass.sum((2, 3), keepdim=True)
    dist.all_reduce(total, group=group)
    return mass / total


class SoftArgmax(torch.autograd.Function):
    """Scores (batch, joints, strip, width), places (2, strip, width) -> (batch, joints, 2)."""

    @staticmethod
    def forward(ctx, scores, places, group):
        prob = softmax_of_strips(scores, group)
        part = torch.einsum("bjhw,chw->bjc", prob, places)
        expected = part.clone()
        dist.all_reduce(expected, group=group)
        ctx.save_for_backward(prob, places, expected)
        return expected

    @staticmethod
    def backward(ctx, grad):
        prob, places, expected = ctx.saved_tensors
        along = torch.einsum("bjc,chw->bjhw", grad, places)
        centre = (grad * expected).sum(-1)[:, :, None, None]
        return prob * (along - centre), None, None


class SoftArgmaxKeepsPart(torch.autograd.Function):
    """Scores (batch, joints, strip, width), places (2, strip, width) -> (batch, joints, 2)."""

    @staticmethod
    def forward(ctx, scores, places, group):
        prob = softmax_of_strips(scores, group)
        expected = torch.einsum("bjhw,chw->bjc", prob, places)
        ctx.save_for_backward(prob, places, expected)
        out = expected.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        prob, places, expected = ctx.saved_tensors
        along = torch.einsum("bjc,chw->bjhw", grad, places)
        centre = (grad * expected).sum(-1)[:, :, None, None]
        return prob * (along - centre), None, None


class Pose(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 6, (1, 3), padding=(0, 1))
        self.mix = nn.Conv2d(6, 7, 1)
        self.maps = nn.Conv2d(7, JOINTS, 1)
        self.stretch = nn.Parameter(torch.tensor([1.1, 0.9]))

    def scores(self, image):
        return 3 * self.maps(torch.relu(self.mix(torch.tanh(self.stem(image)))))


def places_of(lo, hi, like):
    y = (torch.arange(lo, hi) + 0.5).unsqueeze(1).expand(hi - lo, WIDTH) / HEIGHT
    x = ((torch.arange(WIDTH) + 0.5) / WIDTH).expand(hi - lo, WIDTH)
    return torch.stack([y, x]).to(like)


class Clean:
    argmax = SoftArgmax

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 81)
        return Pose()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 82)
        return {
            "image": torch.randn(5, 2, HEIGHT, WIDTH, generator=g),
            "joints": torch.rand(5, JOINTS, 2, generator=g),
        }

    def loss_sum(self, model, rows):
        scores = model.scores(rows["image"])
        prob = scores.flatten(2).softmax(-1).view_as(scores)
        found = torch.einsum("bjhw,chw->bjc", prob, places_of(0, HEIGHT, scores))
        loss = (found * model.stretch - rows["joints"]).square().sum()
        return loss, len(scores)

    def step(self, model, batch, ctx):
        group = ctx.group("strip")
        lo, hi = [(0, 3), (3, 5), (5, 7)][ctx.rank]
        total = len(batch["image"])
        for image, joints in zip(batch["image"].split(2), batch["joints"].split(2), strict=True):
            scores = model.scores(image[:, :, lo:hi])
            found = self.argmax.apply(scores, places_of(lo, hi, scores), group)
            loss = (found * model.stretch - joints).square().sum() / total
            loss.backward()
        for name, p in model.named_parameters():
            if name != "stretch":
                dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    argmax = SoftArgmaxKeepsPart


EXPECT = dict(
    right=[
        (
            r"soft.?argmax|expect(ed|ation)|mean (coordinate|place)|centre|center|moment|"
            r"coordinate|softmax"
        ),
        r"backward|jacobian|gradient|derivative",
        (
            r"local|partial|own strip|before (the )?(all-?)?reduc|unreduced|"
            r"not (all-?)?reduced|strip's|part(ial)? sum|per.?rank|own"
        ),
    ],
    place=[
        r"SoftArgmax",
        r"save_for_backward|saved",
        r"backward",
        r"centre|center",
        r"expected",
        r"scores|maps",
    ],
    wrong=[
        (
            r"normali[sz]er|denominator|softmax (is )?(taken )?(over|of) (the |its )?(own|"
            r"local|strip)"
        ),
        (
            r"coordinates? (are|is) (counted|local|relative|from the strip)|"
            r"y coordinate of the strip"
        ),
        r"halo|border",
        r"divided by (the )?world|averag",
        r"reduced twice",
    ],
)

WHY = """The forward is right on all ranks: softmax over all strips and the expected place summed
over them. The backward needs p * (place - E[place]) with the whole expectation, but the
Function saved the strip's own share of it from before the all-reduce, so too little is
taken off. The gradient of the scores no longer sums to zero over the map, and with it all
of stem, mix and maps is wrong; stretch, which comes after the soft-argmax, is right. A
right cause says that the backward of the soft-argmax centres by a local (unreduced)
expectation. The fix: save the reduced one."""
