"""Self-supervised training on long series under DDP on three ranks: a series of 12 steps is looked at through three overlapping windows of 6 steps (starts 0, 3 and 6). In every window some steps are hidden (set to zero) and have to be
found again from the others. Each window is one micro-batch of all the rows of a rank (no_sync for the first two); the ranks have 4, 2 and 3 series. The divisor is the number of hidden values.

The bug: a window is a slice of the series, a view, and the hidden steps are set to zero in place. The next window, which has three steps in common, finds zeros in its input and takes them for its target. Of the kind of
arogozhnikov/einops issue 234 and pytorch/pytorch PR 17576 (windows by unfold and slices share memory; what is written through one of them is seen by the others).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
STEPS, WINDOW, STARTS, CHANNELS, WIDTH, ROWS = 12, 6, (0, 3, 6), 2, 7, 9
PARTS = [(0, 4), (4, 6), (6, 9)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.entry = nn.Linear(CHANNELS + 1, WIDTH)
        self.places = nn.Parameter(torch.randn(WINDOW, WIDTH) * 0.5)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.joint, self.back = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHANNELS)

    def forward(self, window, hidden):
        seen = torch.cat([window, hidden[..., None].to(window.dtype)], -1)
        x = self.entry(seen) + self.places
        x = x + F.silu(self.mix(x.transpose(1, 2))).transpose(1, 2)
        q, k, v = self.joint(self.norm(x)).chunk(3, -1)
        x = x + self.back(F.scaled_dot_product_attention(q, k, v))
        return self.out(x)


def hide(window, hidden):
    window[hidden] = 0
    return window


def found_again(model, window, hidden):
    wanted = window[hidden].clone()
    guess = model(hide(window, hidden), hidden)
    return F.mse_loss(guess[hidden], wanted, reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        hidden = torch.rand(ROWS, len(STARTS), WINDOW, generator=g) < 0.35
        hidden[:, :, 4] |= ~hidden.any(2)
        return {"series": torch.randn(ROWS, STEPS, CHANNELS, generator=g), "hidden": hidden}

    def loss_sum(self, model, rows):
        loss = 0
        for number, start in enumerate(STARTS):
            window = rows["series"][:, start : start + WINDOW].clone()
            loss = loss + found_again(model, window, rows["hidden"][:, number])
        return loss, int(rows["hidden"].sum())

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def window(self, series, start):
        return series[:, start : start + WINDOW].clone()

    def step(self, model, batch, ctx):
        low, high = PARTS[ctx.rank]
        series, hidden = batch["series"][low:high].clone(), batch["hidden"][low:high]
        count = int(batch["hidden"].sum())
        for number, start in enumerate(STARTS):
            with contextlib.nullcontext() if start == STARTS[-1] else model.no_sync():
                loss = found_again(model, self.window(series, start), hidden[:, number])
                (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    def window(self, series, start):
        return series[:, start : start + WINDOW]


EXPECT = dict(
    right=[
        r"(?i)window|input|series|entry|goes into|handed|what enters|argument|hide|target|wanted",
        r"(?i)micro.?batch(es)? (1|2)|calls? (1|2)|(second|third|later|after|but the first|not the first|except)|"
        r"previous|before|left|overlap|in 2 of 3|positions?|steps|elements|zeros?",
        r"(?i)zeros?|in.?place|overwrit|written|view|memory|other|another|wrong already|changed|alias|left|shared",
    ],
    place=[r"(?i)entry|window|series|hide|wanted|found_again|module|forward|mse_loss|input"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|no_sync.{0,40}(wrong|missing)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped)|(row|rows|series) .{0,25}(never read|read twice|on no rank)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)first micro.?batch.{0,25}(goes|is) wrong|micro.?batch(es)? 0\b.{0,15}(goes|is) wrong|all micro.?batches .{0,15}wrong",
        r"(?i)backward (of|in) \S+ is wrong|saved (input|tensor)",
        r"(?i)(mix|joint|norm|attention) (goes|is) wrong",
    ],
)
WHY = (
    "`window` returns a view of series, and `hide` writes zeros through it (window[hidden] = 0). On every rank the first window (micro-batch 0, steps 0-5) is right. The second (steps 3-8) finds zeros at steps 3-5 where the first window hid "
    "them, the third (steps 6-11) zeros at steps 6-8 where the second hid them: in its input where they are not hidden again, and in `wanted` where they are (targets are taken from the window after the earlier one wrote). So wrong are "
    "micro-batches 1 and 2, positions 0-2 of their windows, in what goes into entry, in all rows that hid something there, and in the targets. Model, DDP, no_sync, count and reduction are right. All gradients are wrong. Fix: clone the "
    "window (or torch.where / masked_fill, not in place)."
)
