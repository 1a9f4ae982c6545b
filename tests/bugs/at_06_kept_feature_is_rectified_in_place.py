"""Feature distillation of a small convolutional student under DistributedDataParallel (two ranks, three micro-batches each, no_sync for the first two): a forward hook keeps the output of a norm layer, which is compared with the teacher's
features (from the batch, before the rectifier); the classifier has the usual loss. The divisor is the number of images.

The bug: the hook keeps the tensor itself, and the next layer is ReLU(inplace=True). When the loss reads the feature it is the rectified one. As in pytorch/pytorch issue 95617 (hooks and in-place
ReLU) and 61519, known from perceptual losses on VGG with in-place
rectifiers. The right code keeps a clone.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
SIDE, CHANNELS, WIDTH, CLASSES, HINT = 5, 2, 4, 3, 0.5
PARTS = [[(0, 2), (2, 3), (3, 6)], [(6, 7), (7, 9), (9, 11)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(CHANNELS, WIDTH, 3, padding=1)
        self.norm = nn.GroupNorm(2, WIDTH)
        self.act = nn.ReLU(inplace=True)
        self.deep = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.deep_norm = nn.GroupNorm(2, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.clone, self.kept = True, None
        self.deep_norm.register_forward_hook(self.keep)

    def keep(self, module, args, out):
        self.kept = out.clone() if self.clone else out

    def forward(self, image):
        h = self.act(self.norm(self.stem(image)))
        h = self.act(self.deep_norm(self.deep(h)))
        scores = self.head(h.mean((2, 3)))
        kept, self.kept = self.kept, None
        return scores, kept


def student_loss(model, rows):
    scores, feature = model(rows["image"])
    loss = F.cross_entropy(scores, rows["label"], reduction="sum")
    return loss + HINT * (feature - rows["teacher"]).square().mean((1, 2, 3)).sum()


class Clean:
    clone = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        return {
            "image": torch.randn(rows, CHANNELS, SIDE, SIDE, generator=g),
            "label": torch.randint(CLASSES, (rows,), generator=g),
            "teacher": torch.randn(rows, WIDTH, SIDE, SIDE, generator=g),
        }

    def loss_sum(self, model, rows):
        return student_loss(model, rows), len(rows["label"])

    def distribute(self, model, ctx):
        model.clone = self.clone
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        count, parts = len(batch["label"]), PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (student_loss(model, rows) * ctx.world_size / count).backward()


class Buggy(Clean):
    clone = False


EXPECT = dict(
    right=[
        r"(?i)feature|hint|kept|keep|hook|deep_norm|loss|term|in.?place|rectif|relu|act\b",
        r"(?i)loss|in.?place|rectif|relu|activation|overwritten|changed after|modified|act\b",
    ],
    place=[r"(?i)deep_norm|feature|hint|hook|kept|loss|act\b"],
    wrong=[
        r"(?i)(stem|deep|head)(\.weight|\.bias)? .{0,20}goes wrong (first|in the forward)",
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted (twice|again)",
        r"(?i)no_sync.{0,40}(wrong|missing|too (early|late))"
        r"|micro.?batch(es)? .{0,20}(lost|dropped)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)head\.(weight|bias) (is|are) wrong|(label|target|image)s? (is|are) (wrong|of other)",
    ],
)
WHY = (
    "The scores and all modules' forwards are right on both ranks. The feature handed to the hint term is the output of deep_norm after the in-place ReLU that follows it, instead of before: negative "
    "entries are zero, so the hint term compares max(0, feature) "
    "with the teacher's features, and its gradient is masked where the feature is negative and enters behind the rectifier. Wrong in all rows, micro-batches and ranks. The head (classification loss "
    "only) is right; stem, norm, deep and deep_norm have wrong gradients "
    "(loss term hint, its gradient into deep_norm). Weight 0.5, divisor 11, no_sync and DDP's average are right. Fix: keep out.clone() in the hook, or ReLU(inplace=False)."
)
