"""Speech separation with permutation invariant training under DDP on two ranks with two micro-batches each (no_sync for the first) and uneven rows: a GRU over the frames of the mixture gives masks for three speakers; the squared errors
of all pairs of output and speaker are summed over the valid frames, and each utterance takes the assignment with the smallest sum. Divisor: all valid frames of all ranks.

The bug: the errors of the assignments are summed over the utterances before the minimum is taken: one assignment for all utterances of a micro-batch, the one that is best in sum. After the questions on how the minimum is to be taken in
asteroid (asteroid-team/asteroid #24, #691: a loss per utterance and permutation) and snsun/pit-speech-separation #5.
"""

import contextlib
import itertools

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
FRAMES, BINS, WIDTH, SPEAKERS = 7, 5, 6, 3
PARTS = [[(0, 4), (4, 7)], [(7, 10), (10, 15)]]
ORDERS = torch.tensor(list(itertools.permutations(range(SPEAKERS))))


class Separator(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(BINS)
        self.frames = nn.GRU(BINS, WIDTH, batch_first=True)
        self.masks = nn.Linear(WIDTH, SPEAKERS * BINS)
        nn.init.normal_(self.masks.weight, std=0.8)

    def forward(self, mixture):
        h = self.frames(self.norm(mixture))[0]
        masks = self.masks(h).unflatten(-1, (SPEAKERS, BINS)).sigmoid()
        return (masks * mixture[:, :, None]).transpose(1, 2)


def separation_loss(model, rows, together):
    voices = rows["voices"]
    guess = model(voices.sum(1))
    valid = torch.arange(FRAMES)[None] < rows["length"][:, None]
    error = (guess[:, :, None] - voices[:, None]).square().sum(-1)
    pairs = (error * valid[:, None, None]).sum(-1)
    by_order = sum(pairs[:, out, ORDERS[:, out]] for out in range(SPEAKERS))
    if together:
        return by_order.sum(0).min()
    return by_order.min(1).values.sum()


class Clean:
    together = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Separator()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        loud = torch.rand(rows, SPEAKERS, 1, BINS, generator=g) * 2
        return {
            "voices": loud * torch.randn(rows, SPEAKERS, FRAMES, BINS, generator=g).abs(),
            "length": torch.randint(3, FRAMES + 1, (rows,), generator=g),
        }

    def loss_sum(self, model, rows):
        return separation_loss(model, rows, False), int(rows["length"].sum())

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        count, parts = int(batch["length"].sum()), PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = separation_loss(model, rows, self.together)
                (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    together = True


EXPECT = dict(
    right=[
        r"(?i)loss|permutation|assignment|order|minimum|gradient (of|with respect to|at|that reaches) (the )?(output|masks)|target|voices",
        r"(?i)rows?|utterance|micro.?batch|together|couple|jointly|coupl|depend",
        r"(?i)wrong|differ|other|depend|couple|together|jointly|one (permutation|assignment|order)|not ",
    ],
    place=[r"(?i)loss|permutation|assignment|masks|output"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|wrong divisor|mean of means",
        r"(?i)divi(ded|des) by (its|their) own|no_sync.{0,40}(wrong|missing|too (early|late))|factor of (1/)?[0-9]",
        r"(?i)forward of (the )?(model|frames|masks|norm|GRU).{0,20}wrong|wrong in the backward",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only (in )?(the )?(first|last) micro.?batch",
        r"(?i)rows? .{0,20}(never read|skipped|read twice)|padding .{0,20}counted",
    ],
)
WHY = (
    "Both ranks, all micro-batches: the loss of a micro-batch is the minimum over the six assignments of the sum over its utterances, instead of the sum of the utterances' minima. Utterances whose own best assignment is not the "
    "common one are trained towards other speakers (rows whose own best is the common one are right, so which rows are wrong depends on the data and on how the rows are put into micro-batches). The model's forward is right on both "
    "ranks; the gradient at its output is wrong for those rows, and with it norm, frames and masks, equally on both ranks after DDP's average. The valid frames, divisor, no_sync and reduction are right. Fix: "
    "by_order.min(1).values.sum()."
)
