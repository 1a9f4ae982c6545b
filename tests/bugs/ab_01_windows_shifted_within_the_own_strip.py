"""Dense labelling with a small Swin transformer (windows of 2 x 2, every second block with windows shifted by 1), spatial parallel: the image is cut into horizontal strips of whole rows of windows, uneven ones (4, 4 and 2 token rows on three
ranks), all ranks have the same images, the weights are replicated, gradients are summed. Two micro-batches.

The bug: the shifted blocks run on the strip as on an image. `torch.roll` along the height wraps around inside the strip, and the mask of the wrapped windows is made for the strip's height, so windows never reach across the border of two strips.
The rows must come from the neighbour. After reports on spatial ("domain") parallel weather models with Swin blocks, where unshifted windows need no exchange and the shifted ones were left as they are.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"strip": 3}}}}
ROWS, CHANNELS, HEIGHT, BREADTH, WINDOW, WIDTH, CLASSES, MICRO = 5, 3, 10, 6, 2, 8, 4, 2
IGNORE = -100


class Whole(torch.autograd.Function):
    """The strips of all ranks, one below the other; each rank goes on with other rows of it."""

    @staticmethod
    def forward(ctx, x, span, group):
        ctx.span, ctx.group = span, group
        whole = x.new_zeros(x.shape[0], HEIGHT, *x.shape[2:])
        whole[:, span] = x
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g, group=ctx.group)
        return g[:, ctx.span], None, None


def windows(x):
    """b, h, w, c -> b, number of windows, tokens of a window, c."""
    b, h, w, c = x.shape
    x = x.reshape(b, h // WINDOW, WINDOW, w // WINDOW, WINDOW, c)
    return x.transpose(2, 3).reshape(b, -1, WINDOW * WINDOW, c)


def image(x, h):
    b, c = x.shape[0], x.shape[-1]
    x = x.reshape(b, h // WINDOW, BREADTH // WINDOW, WINDOW, WINDOW, c)
    return x.transpose(2, 3).reshape(b, h, BREADTH, c)


def wrapped_mask(h, shift):
    """Which pairs of tokens of a window were neighbours before the roll, for an image of height h."""
    part = torch.zeros(1, h, BREADTH, 1)
    for i, rows in enumerate((slice(0, -WINDOW), slice(-WINDOW, -shift), slice(-shift, None))):
        for j, cols in enumerate((slice(0, -WINDOW), slice(-WINDOW, -shift), slice(-shift, None))):
            part[:, rows, cols] = 3 * i + j
    part = windows(part)[0, :, :, 0]
    return part[:, :, None] == part[:, None, :]


class Place:
    """Where this process's rows lie in the image, and how rows are moved."""

    def __init__(self, span=slice(0, HEIGHT), group=None, across=True):
        self.span, self.group, self.across = span, group, across

    def roll(self, x, shift):
        x = torch.roll(x, shift, 2)
        if self.group is None or not self.across:
            return torch.roll(x, shift, 1)
        return torch.roll(Whole.apply(x, self.span, self.group), shift, 1)[:, self.span]

    def mask(self, h, shift):
        if not self.across:
            return wrapped_mask(h, shift)
        per_row = BREADTH // WINDOW
        first, last = self.span.start // WINDOW, self.span.stop // WINDOW
        return wrapped_mask(HEIGHT, shift)[first * per_row : last * per_row]


class Block(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.shift = shift
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(0.5 * torch.randn(WINDOW * WINDOW, WINDOW * WINDOW))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def attend(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) * WIDTH**-0.5 + self.bias
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return self.out(scores.softmax(-1) @ v)

    def forward(self, x, place):
        h, y, mask = x.shape[1], self.norm(x), None
        if self.shift:
            y, mask = place.roll(y, -self.shift), place.mask(h, self.shift)
        y = image(self.attend(windows(y), mask), h)
        if self.shift:
            y = place.roll(y, self.shift)
        x = x + y
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Swin(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(CHANNELS, WIDTH)
        self.blocks = nn.ModuleList(Block(i % 2) for i in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.place = Place()

    def forward(self, x):
        x = self.patch(x)
        for block in self.blocks:
            x = block(x, self.place)
        return self.head(self.norm(x))


class Clean:
    across = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Swin()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        labels = torch.randint(CLASSES, (ROWS, HEIGHT, BREADTH), generator=g)
        unknown = torch.rand(ROWS, HEIGHT, BREADTH, generator=g) < 0.2
        return {
            "pixels": torch.randn(ROWS, HEIGHT, BREADTH, CHANNELS, generator=g),
            "labels": labels.masked_fill(unknown, IGNORE),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["pixels"]).flatten(0, 2)
        loss = F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum")
        return loss, int((rows["labels"] != IGNORE).sum())

    def distribute(self, model, ctx):
        cuts = torch.arange(HEIGHT // WINDOW).tensor_split(ctx.world_size)[ctx.rank]
        span = slice(int(cuts[0]) * WINDOW, (int(cuts[-1]) + 1) * WINDOW)
        model.place = Place(span, ctx.group("strip"), self.across)
        return model

    def step(self, model, batch, ctx):
        count = int((batch["labels"] != IGNORE).sum())
        strip = {k: v[:, model.place.span] for k, v in batch.items()}
        for m in range(MICRO):
            loss, _ = self.loss_sum(model, {k: v.tensor_split(MICRO)[m] for k, v in strip.items()})
            (loss / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("strip"))


class Buggy(Clean):
    across = False


EXPECT = dict(
    right=[
        r"(?i)forward|output|activation",
        r"(?i)shift|roll|window|strip|border|neighbou?r|other ranks|own (rows|part|shard|slice)|exchange|mask|attend|local",
    ],
    place=[r"(?i)blocks?\.(1|3)|shift|roll"],
    wrong=[
        r"(?i)(whole|entire) forward (is|was) (right|correct)|forward and (the )?loss (are|is|agree)|\bloss (is|are) (right|correct)",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their) own|factor of (1/)?3\b",
        r"(?i)blocks?\.(0|2) .{0,30}(goes wrong first|is the first)|first (in|at|inside) .{0,5}blocks?\.(0|2)\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read)",
    ],
)
WHY = (
    "Blocks 1 and 3 shift their windows by one row and one column. On a strip the roll along the height must take its rows from the neighbouring strip; the buggy step rolls within the strip and masks the wrapped windows as if the strip were "
    "the image. The windows that should join the last row of a strip with the first row of the next one are each cut in two. The forward goes wrong first in blocks.1, on all three ranks, for the tokens at the borders of the strips (rows 3, "
    "4, 7, 8), then everywhere those are attended by later; patch and blocks.0 and the norm of blocks.1 have the right outputs. Logits and loss are wrong, so the gradients of all parameters are wrong in direction, the same on all ranks "
    "after the sum. The roll along the breadth, the reduction, the count and the rows are right. Fix: take the rows from the next (and on the way back from the previous) strip before the windows are cut, and the mask of the whole image's "
    "height."
)
