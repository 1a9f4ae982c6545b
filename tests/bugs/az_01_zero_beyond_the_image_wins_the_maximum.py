"""Segmentation with spatial parallelism (sp 3): images of nine rows are cut into strips of 3, 4 and 2 rows. A stem convolution, a max pooling 3 x 3 with stride 1 and padding 1, and a second convolution each fetch one row from the strip
above and the strip below (a halo exchange with an adjoint written by hand). Two micro-batches; the gradients of the parameters are summed over sp.

The bug: one exchange serves convolutions and pooling alike, and beyond the upper and the lower edge of the image it fills the halo with zeros. A convolution wants that; a max pooling wants minus infinity, and where a map is negative at
the edge, the zero wins. As in distdl/distdl issue 195 (New distributed max pool does not use correct default padding), compare pytorch/pytorch issue 33382.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
ROWS, SIDE, WIDTH, CLASSES = 5, 9, 4, 3
STRIPS = [3, 4, 2]
PARTS = [slice(0, 3), slice(3, 5)]


class Halo(torch.autograd.Function):
    """One row of each neighbour above and below; `fill` where there is no neighbour."""

    @staticmethod
    def forward(ctx, x, group, fill):
        ctx.group = group
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        edges = torch.stack([x[:, :, 0], x[:, :, -1]])
        all_edges = [torch.empty_like(edges) for _ in range(size)]
        dist.all_gather(all_edges, edges, group=group)
        blank = torch.full_like(x[:, :, 0], fill)
        above = all_edges[rank - 1][1] if rank else blank
        below = all_edges[rank + 1][0] if rank < size - 1 else blank
        return torch.cat([above[:, :, None], x, below[:, :, None]], 2)

    @staticmethod
    def backward(ctx, grad):
        rank, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        edges = torch.stack([grad[:, :, 0], grad[:, :, -1]])
        all_edges = [torch.empty_like(edges) for _ in range(size)]
        dist.all_gather(all_edges, edges, group=ctx.group)
        out = grad[:, :, 1:-1].clone()
        if rank:
            out[:, :, 0] += all_edges[rank - 1][1]
        if rank < size - 1:
            out[:, :, -1] += all_edges[rank + 1][0]
        return out, None, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, WIDTH, 3)
        self.mix = nn.Conv2d(WIDTH, WIDTH, 3)
        self.classify = nn.Conv2d(WIDTH, CLASSES, 1)
        self.group, self.beyond = None, float("-inf")
        with torch.no_grad():
            self.stem.bias.sub_(0.7)

    def grow(self, x, fill):
        if self.group is None:
            return F.pad(x, (0, 0, 1, 1), value=fill)
        return Halo.apply(x, self.group, fill)

    def forward(self, x):
        x = self.stem(F.pad(self.grow(x, 0.0), (1, 1)))
        x = F.max_pool2d(self.grow(x, self.beyond), 3, 1, padding=(0, 1))
        x = F.silu(self.mix(F.pad(self.grow(x, 0.0), (1, 1))))
        return self.classify(x)


class Clean:
    beyond = float("-inf")

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(ROWS, 2, SIDE, SIDE, generator=g),
            "label": torch.randint(CLASSES, (ROWS, SIDE, SIDE), generator=g),
        }

    def loss_sum(self, model, rows):
        loss = F.cross_entropy(model(rows["image"]), rows["label"], reduction="sum")
        return loss, rows["label"].numel()

    def distribute(self, model, ctx):
        model.group, model.beyond = ctx.group("sp"), self.beyond
        return model

    def step(self, model, batch, ctx):
        first = sum(STRIPS[: ctx.rank])
        strip = slice(first, first + STRIPS[ctx.rank])
        for part in PARTS:
            scores = model(batch["image"][part, :, strip])
            loss = F.cross_entropy(scores, batch["label"][part, strip], reduction="sum")
            (loss / (ROWS * SIDE * SIDE)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("sp"))


class Buggy(Clean):
    beyond = 0.0


EXPECT = dict(
    right=[
        r"(?i)forward|max|pool|halo|pad|fill|edge|beyond|border|boundar",
        r"(?i)zero|pad|fill|infinit|\binf\b|edge|beyond|border|boundar|halo|max.?pool|"
        r"input of .?mix",
        r"(?i)rank|strip|sp\b|edge|image|top|bottom|first and (the )?last|outer|mix",
    ],
    place=[r"(?i)pool|halo|mix|between .?stem|grow|edge"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward is right|wrong only in the backward",
        r"(?i)rank 1.{0,25}(goes|is) wrong|all (three )?ranks.{0,25}forward.{0,20}wrong",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|missing)",
        r"(?i)stem.{0,20}forward.{0,20}wrong|halo.{0,30}(detached|without gradient|"
        r"gradient (is )?lost)",
    ],
)
WHY = (
    "Only the edge of the image is wrong: on rank 0 (strip of rows 0-2) the upper halo row of the max pooling and on rank 2 (rows 7, 8) the lower one are zeros instead of minus infinity. In image row 0 and row 8 the pooled value "
    "becomes max(0, true value), in both micro-batches and all rows. Rank 1 has two neighbours and is right, and so are the convolutions, for which zeros are right; the columns at the left and right edge use max_pool2d's own padding. "
    "So the forward goes wrong between `stem` and `mix` (the input of `mix`) on ranks 0 and 2. Where the zero wins, the gradient goes to the fill value and is lost to `stem`; mix and classify see wrong features. The exchange of rows "
    "between neighbours and its adjoint, the sum over sp and the divisor 405 are right. Fix: fill the pooling's halo with -inf."
)
