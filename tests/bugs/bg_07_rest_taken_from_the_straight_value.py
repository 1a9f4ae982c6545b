"""A small sound codec under DDP on two ranks, three micro-batches each of uneven size (no_sync before the last): strided convolutions, a residual quantiser with three codebooks, transposed convolution back. Loss per clip: squared error of the
sound, the distance of each level's rest to its code (commitment, for the encoder) and of its code to the rest (for the codebook). The codes go straight through as a whole. The divisor is the number of clips.

The bug: the rest for the next level is made with the level's straight-through output. Its value is right, but it takes the rest's own gradient away, and the later levels' commitment no longer reaches the encoder. After facebookresearch/encodec
issue 25 (Zero grad in residual vq).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
SAMPLES, WIDTH, CODES, LEVELS, ROWS = 21, 4, 6, 3, 11
PARTS = [[(0, 1), (1, 4), (4, 6)], [(6, 8), (8, 9), (9, 11)]]
COMMIT = 0.7


class Level(nn.Module):
    def __init__(self, spread):
        super().__init__()
        self.codes = nn.Parameter(torch.randn(CODES, WIDTH) * spread)

    def forward(self, rest):
        nearest = torch.cdist(rest.detach().flatten(0, 1), self.codes.detach()).argmin(1)
        code = self.codes[nearest].view_as(rest)
        commit = (rest - code.detach()).square().sum((1, 2))
        learn = (rest.detach() - code).square().sum((1, 2))
        return rest + (code - rest).detach(), COMMIT * commit + learn


class Quantiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList(Level(0.6 / 2**n) for n in range(LEVELS))
        self.cut_rest = True

    def forward(self, z):
        rest, total, terms = z, torch.zeros_like(z), 0.0
        for level in self.levels:
            taken, term = level(rest)
            total, terms = total + taken.detach(), terms + term
            rest = rest - (taken.detach() if self.cut_rest else taken)
        return z + (total - z).detach(), terms


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 6, 3, stride=2), nn.Conv1d(6, WIDTH, 3)
        self.quantiser = Quantiser()
        self.back, self.last = (
            nn.Conv1d(WIDTH, 6, 3, padding=2),
            nn.ConvTranspose1d(6, 1, 3, stride=2),
        )

    def forward(self, sound):
        z = self.second(F.silu(self.first(sound[:, None])))
        z, terms = self.quantiser(z.transpose(1, 2))
        return self.last(F.silu(self.back(z.transpose(1, 2)))).squeeze(1), terms


def clip_loss(model, sound):
    again, terms = model(sound)
    return (again - sound).square().sum() + terms.sum()


class Clean:
    cut_rest = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {"sound": torch.randn(ROWS, SAMPLES, generator=g)}

    def loss_sum(self, model, rows):
        return clip_loss(model, rows["sound"]), len(rows["sound"])

    def distribute(self, model, ctx):
        model.quantiser.cut_rest = self.cut_rest
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (clip_loss(model, batch["sound"][low:high]) * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    cut_rest = False


EXPECT = dict(
    right=[
        r"(?i)quantis|level|encoder|\bfirst\b|\bsecond\b|rest",
        r"(?i)backward|gradient|detach|graph|flow|hands? (back|on)|stop",
    ],
    place=[r"(?i)quantiser|levels?|\bsecond\b"],
    wrong=[
        r"(?i)(?<!not )forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)\b(back|last)(\.(weight|bias))? (is|are|has|have) (a )?wrong|codes (is|are) wrong|wrong gradients? of (the )?codes",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|no_sync.{0,40}(wrong|missing)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the (first|last) micro.?batch",
        r"(?i)only (on )?rank [01]\b|rank [01] alone|recomput|labels",
    ],
)
WHY = (
    "In Quantiser.forward the rest for the next level is rest - taken, where taken = rest + (code - rest).detach() has gradient one to rest: the rest of levels 1 and 2 has no gradient (one minus one). With taken.detach() the commitment of levels 1 "
    "and 2 goes on to z and the encoder. All values and the loss are right. Wrong are the gradients of the encoder alone, first.* and second.* (the commitment part of levels 1 and 2 is missing), on both ranks, in all micro-batches and rows; the "
    "codebooks (their term reads the detached rest), back and last are right. DDP, no_sync, divisor 11 are right. Fix: detach the taken value."
)
