"""Change detection (remote sensing): a Siamese network sees two images of a place, before and after, with a shared encoder; a forward hook keeps the features of the early stage for the decoder (skip connection), as feature extractors do
it. Two ranks with three micro-batches each, gradients summed over dp by hand. Pixels without a label (255) do not count; the divisor is the number of labelled pixels of the whole batch.

The bug: the hook writes into one dict of the module, and the first call's features are kept as a reference to that dict, not as a copy. The second call overwrites the entry, so the decoder gets the early features of the image after
twice and never those before. As with hooks on modules that are called several times in public code (features saved by module name; timm's FeatureHooks hands out and clears its dict at each call for that reason).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
SIDE, CHANNELS, WIDTH, CLASSES = 6, 2, 4, 3
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 6), (6, 8), (8, 9)]]
ROWS = 9


class ChangeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.early = nn.Sequential(nn.Conv2d(CHANNELS, WIDTH, 3, padding=1), nn.SiLU())
        self.late = nn.Sequential(
            nn.Conv2d(WIDTH, 6, 3, stride=2, padding=1), nn.GroupNorm(2, 6), nn.SiLU()
        )
        self.merge = nn.Conv2d(12, 6, 1)
        self.skip = nn.Conv2d(2 * WIDTH, 6, 1)
        self.head = nn.Conv2d(6, CLASSES, 3, padding=1)
        self.kept, self.copy = {}, True
        self.early.register_forward_hook(self.keep)

    def keep(self, module, inputs, output):
        self.kept["early"] = output

    def features(self, image):
        top = self.late(self.early(image))
        return top, dict(self.kept) if self.copy else self.kept

    def forward(self, before, after):
        top_before, kept_before = self.features(before)
        top_after, kept_after = self.features(after)
        x = self.merge(torch.cat([top_before, top_after], 1))
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        early = torch.cat([kept_before["early"], kept_after["early"]], 1)
        self.kept.clear() if self.copy else None
        return self.head(F.silu(x + self.skip(early)))


def change_loss(model, rows):
    scores = model(rows["before"], rows["after"])
    return F.cross_entropy(scores, rows["label"], reduction="sum", ignore_index=255)


class Clean:
    copy = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return ChangeNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        label = torch.randint(CLASSES, (ROWS, SIDE, SIDE), generator=g)
        unknown = torch.rand(ROWS, SIDE, SIDE, generator=g) < 0.2
        return {
            "before": torch.randn(ROWS, CHANNELS, SIDE, SIDE, generator=g),
            "after": torch.randn(ROWS, CHANNELS, SIDE, SIDE, generator=g),
            "label": label.masked_fill(unknown, 255),
        }

    def loss_sum(self, model, rows):
        return change_loss(model, rows), int((rows["label"] != 255).sum())

    def distribute(self, model, ctx):
        model.copy = self.copy
        return model

    def step(self, model, batch, ctx):
        pixels = int((batch["label"] != 255).sum())
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            (change_loss(model, rows) / pixels).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    copy = False


EXPECT = dict(
    right=[r"(?i)forward|input|features?|output|hook", r"(?i)skip|early|features?|hook"],
    place=[r"(?i)\bskip\b|early|features?|hook"],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their) own|mean of means|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)forward is right|wrong only in the backward|backward (alone )?is wrong",
        r"(?i)(labels?|targets?) .{0,15}(wrong|shifted)|ignore.{0,15}wrong",
        r"(?i)only (on )?rank [01]\b|rank [01] alone|features? of (another|an earlier|the previous) micro.?batch",
        r"(?i)late.{0,25}(output|forward).{0,15}wrong|merge.{0,25}(output|forward|input).{0,15}wrong",
    ],
)
WHY = (
    "On both ranks, in all rows and micro-batches, kept_before is the same dict as kept_after, so its entry 'early' is the early feature map of the image after. The input of skip is (after, after) instead of (before, after): the forward "
    "goes wrong at skip (first WIDTH channels of its input); early, late and merge give right outputs. The gradients: skip.weight wrong in the first 4 input channels and, through the wrong logits, everything else too (head, merge, late, "
    "early); early also lacks the path from the skip of the image before and gets it for the image after instead. Divisor, labels, the all-reduce and the accumulation are right. Fix: keep a copy of the dict (or the tensor itself) after "
    "the first call."
)
