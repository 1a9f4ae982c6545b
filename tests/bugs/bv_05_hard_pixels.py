"""Online hard example mining in semantic segmentation: the loss of an image is the mean over its nine hardest pixels. The seven lines of an image are cut over three ranks (3, 2 and 2); the convolution reads
the image itself, so that the halo is data; the pixel losses of all strips are exchanged (without gradient) to find the limit, each rank adds up those of its pixels that reach it. Two micro-batches,
gradients summed over the ranks.

The bug: every rank looks for the hardest pixels in its own strip, a third of the number in each. After OHEM losses (mmseg, PIDNet/HRNet forks) used unchanged with crops that are spread over ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"lines": 3}}}}
ROWS, COLOURS, HEIGHT, BREADTH, WIDTH, CLASSES, HARDEST = 5, 3, 7, 4, 6, 4, 9


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(COLOURS, WIDTH, 3, padding=(0, 1))
        self.norm = nn.LayerNorm(WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.classes = nn.Linear(WIDTH, CLASSES)

    def forward(self, padded):
        """padded: one line more above and below than comes out"""
        h = self.norm(self.conv(padded).permute(0, 2, 3, 1))
        return self.classes(h + F.gelu(self.hidden(h)))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Segmenter()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        light = torch.linspace(0.3, 2.5, HEIGHT)[:, None]
        return {
            "image": torch.randn(ROWS, COLOURS, HEIGHT, BREADTH, generator=g) * light,
            "labels": torch.randint(CLASSES, (ROWS, HEIGHT, BREADTH), generator=g),
        }

    @staticmethod
    def pixel_losses(model, image, labels, lo, hi):
        padded = F.pad(image, (0, 0, 1, 1))[:, :, lo : hi + 2]
        logits = model(padded)
        losses = F.cross_entropy(logits.flatten(0, 2), labels[:, lo:hi].flatten(), reduction="none")
        return losses.view(len(image), -1)

    def loss_sum(self, model, rows):
        losses = self.pixel_losses(model, rows["image"], rows["labels"], 0, HEIGHT)
        return losses.topk(HARDEST, dim=1).values.sum() / HARDEST, len(losses)

    def hard_losses(self, losses, lo, hi, ctx):
        everywhere = losses.new_zeros(len(losses), HEIGHT * BREADTH)
        everywhere[:, lo * BREADTH : hi * BREADTH] = losses.detach()
        dist.all_reduce(everywhere, group=ctx.group("lines"))
        limit = everywhere.topk(HARDEST, dim=1).values[:, -1:]
        return losses * (losses.detach() >= limit)

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        own = torch.arange(HEIGHT).tensor_split(ctx.world_size)[ctx.rank]
        lo, hi = int(own[0]), int(own[-1]) + 1
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in batch.items()}
            losses = self.pixel_losses(model, part["image"], part["labels"], lo, hi)
            hard = self.hard_losses(losses, lo, hi, ctx)
            (hard.sum() / HARDEST / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("lines"))


class Buggy(Clean):
    def hard_losses(self, losses, lo, hi, ctx):
        return losses.topk(HARDEST // ctx.world_size, dim=1).values


EXPECT = dict(
    right=[
        r"top.?k|hard|select|choose|chosen|pick|pixel|largest|highest|limit|threshold|which (elements|positions|losses)|mining",
        r"own|local|each rank|every rank|per.?rank|each strip|per strip|own strip|shard|whole image|global|(not|never|no longer|missing|without|absent).{0,60}(exchang|gather|reduc|collective)",
    ],
    place=[
        r"hard_losses",
        r"top.?k",
        r"everywhere|limit",
        r"HARDEST ?// ?|world_size",
        r"pixel.?losses",
    ],
    wrong=[
        r"halo|padding|conv.{0,30}wrong|border",
        r"parameters?.{0,30}(not reduced|reduced twice)|missing (all.?)?reduc\w* of (the )?(gradient|parameter)",
        r"mean of means|own count|divisor|micro.?batch(es)? .{0,30}(lost|dropped|overwritten)|counted (twice|two times)",
        r"gradient .{0,30}(not|never) (reduced|summed)",
    ],
)
WHY = (
    "The nine hardest pixels of an image have to be looked for among all 28; hard_losses takes the three hardest of the own strip on each of the three ranks, so that pixels of an easy strip displace harder ones of "
    "another (the lower lines are the difficult ones here). The number is the same and the divisor right, but the set is another, in both micro-batches, and all gradients are wrong alike on all ranks after the sum. "
    "A right cause says that the selection (top-k) is made in each rank's own part instead of the whole image, or that the exchange of the losses for it is missing. Fix: gather the detached losses and use the global limit."
)
