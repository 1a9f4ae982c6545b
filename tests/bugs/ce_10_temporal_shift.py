"""A video classifier with temporal shift modules; the 7 frames of a clip are cut over 3 ranks (3, 2
and 2) and the frames at the borders are exchanged by a hand-written Function.

The first fold of the channels is taken from the frame after, the second fold from the frame
before.

The bug: of the last frame the first fold is sent to the next rank, too, not the second. After
TSM (Lin et al., temporal-shift-module) in time-sharded inference and training code, where both
border messages are made by one line that was copied; the shapes are equal, so nothing complains.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"time": 3}}}}
FRAMES, CHANNELS, FOLD = 7, 11, 3
PARTS = [(0, 3), (3, 5), (5, 7)]


def swap(to_before, to_after, group):
    """Sends a tensor to each neighbour; returns what both have sent (zeros at the ends)."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    from_before, from_after = torch.zeros_like(to_after), torch.zeros_like(to_before)
    work = []
    if rank > 0:
        peer = dist.get_global_rank(group, rank - 1)
        work += [
            dist.isend(to_before, peer, group=group),
            dist.irecv(from_before, peer, group=group),
        ]
    if rank < world - 1:
        peer = dist.get_global_rank(group, rank + 1)
        work += [dist.isend(to_after, peer, group=group), dist.irecv(from_after, peer, group=group)]
    for w in work:
        w.wait()
    return from_before, from_after


class Borders(torch.autograd.Function):
    @staticmethod
    def forward(ctx, to_before, to_after, group):
        ctx.group = group
        return swap(to_before.contiguous(), to_after.contiguous(), group)

    @staticmethod
    def backward(ctx, grad_before, grad_after):
        of_after_messages = swap(grad_before.contiguous(), grad_after.contiguous(), ctx.group)
        return of_after_messages[0], of_after_messages[1], None


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def shift(x, before, after):
    """x: (batch, frames, channels); before, after: a fold of the neighbouring frames."""
    first = torch.cat([x[:, 1:, :FOLD], after.unsqueeze(1)], 1)
    second = torch.cat([before.unsqueeze(1), x[:, :-1, FOLD : 2 * FOLD]], 1)
    return torch.cat([first, second, x[:, :, 2 * FOLD :]], 2)


def shift_alone(x):
    zero = torch.zeros_like(x[:, 0, :FOLD])
    return shift(x, zero, zero)


class Video(nn.Module):
    def __init__(self):
        super().__init__()
        self.frame = nn.Linear(8, CHANNELS)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(CHANNELS, 9), nn.GELU(), nn.Linear(9, CHANNELS))
            for _ in range(3)
        )
        self.head = nn.Linear(CHANNELS, 4)

    def features(self, clip, shifted):
        x = self.frame(clip)
        for block in self.blocks:
            x = x + block(shifted(x))
        return torch.tanh(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 101)
        return Video()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 102)
        return {
            "clip": torch.randn(7, FRAMES, 8, generator=g),
            "label": torch.randint(0, 4, (7,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model.head(model.features(rows["clip"], shift_alone).mean(1))
        return F.cross_entropy(logits, rows["label"], reduction="sum"), len(logits)

    def shift_over_ranks(self, x, group):
        before, after = Borders.apply(x[:, 0, :FOLD], x[:, -1, FOLD : 2 * FOLD], group)
        return shift(x, before, after)

    def step(self, model, batch, ctx):
        group = ctx.group("time")
        lo, hi = PARTS[ctx.rank]
        total = len(batch["label"])
        for clip, label in zip(batch["clip"].split(4), batch["label"].split(4), strict=True):
            x = model.features(clip[:, lo:hi], lambda x: self.shift_over_ranks(x, group))
            logits = model.head(SumOut.apply(x.sum(1), group) / FRAMES)
            (F.cross_entropy(logits, label, reduction="sum") / total).backward()
        for name, p in model.named_parameters():
            if not name.startswith("head"):
                dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def shift_over_ranks(self, x, group):
        before, after = Borders.apply(x[:, 0, :FOLD], x[:, -1, :FOLD], group)
        return shift(x, before, after)


EXPECT = dict(
    right=[
        r"shift|border|boundary|halo|edge|neighbou?r",
        r"fold|channel|slice|:FOLD",
        (
            r"wrong|first fold|instead|same (fold|channels)|second fold|other|swapped|mix|"
            r"not the|belong|should"
        ),
    ],
    place=[
        r"shift_over_ranks|shift",
        r"Borders",
        r"to_after|last frame|-1",
        r"halo|border|boundary|edge",
    ],
    wrong=[
        r"not exchanged|zeros? (are )?(used|at)|without (the )?(exchange|halo)",
        r"detach|gradient (is )?not sent|backward (of|sends)",
        r"wrong (rank|neighbou?r|direction)",
        r"mean (over|of) (the )?(own|local) frames|mean of means",
        r"reduced twice|not (all-?)?reduced",
    ],
)

WHY = """The second fold of a frame's channels has to come from the frame before. Within a rank it
does; across a border the rank before sends the first fold of its last frame, so the first
frame of ranks 1 and 2 is given other channels. The backward of the exchange is consistent
with this, so gradients arrive in the wrong channels of the last frame, too. All gradients
are wrong, since the features are; messages to the rank before, the pooled mean and the
reductions are right. A right cause says that wrong channels (fold) of the last frame are
sent to the next rank. The fix: send x[:, -1, FOLD : 2 * FOLD]."""
