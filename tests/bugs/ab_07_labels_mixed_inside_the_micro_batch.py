"""Image classification with mixup in a pipeline of three stages (torch.distributed.pipelining, 1F1B, four micro-batches). As in timm, a batch is mixed with itself: image i with image `partner[i]`, and the loss is the mixture of the cross
entropies with both labels. The images are mixed before they enter the first stage, over the full batch.

The bug: the loss function of the last stage makes the second labels itself, as the loop without a pipeline did: by the reversed order of the labels it is given. With timm's `x.flip(0)` on the full batch that was the partner's label; the
schedule calls the loss per micro-batch, so it is the label of another image of the same micro-batch. After a port of a timm recipe to pipelining (labels mixed in the criterion).
"""

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, CHANNELS, SIDE, WIDTH, CLASSES, MICRO, SHARE = 12, 2, 5, 6, 7, 4, 0.7


class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, WIDTH, 3, padding=1)

    def forward(self, x):
        return torch.tanh(self.conv(x))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, WIDTH)
        self.conv, self.back = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x):
        return x + self.back(F.silu(self.conv(self.norm(x))))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.classes = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x):
        return self.classes(torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1))


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(Stem(), *(Residual() for _ in range(4)), Head())


def mixed_loss(logits, label, second):
    first = F.cross_entropy(logits, label, reduction="sum")
    return SHARE * first + (1 - SHARE) * F.cross_entropy(logits, second, reduction="sum")


class Clean:
    second_label_given = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(ROWS, CHANNELS, SIDE, SIDE, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
            "partner": torch.arange(ROWS).flip(0),
        }

    def loss_sum(self, model, rows):
        all_rows = self.batch()
        images = SHARE * rows["image"] + (1 - SHARE) * all_rows["image"][rows["partner"]]
        second = all_rows["label"][rows["partner"]]
        return mixed_loss(model(images), rows["label"], second), len(rows["label"])

    def distribute(self, model, ctx):
        parts = list(model)
        cuts = [0, 2, 4, len(parts)]
        return nn.Sequential(*parts[cuts[ctx.rank] : cuts[ctx.rank + 1]])

    def step(self, model, batch, ctx):
        target = torch.stack([batch["label"], batch["label"][batch["partner"]]], 1)

        def loss_of(logits, target):
            label, second = target.unbind(1)
            if not self.second_label_given:
                second = label.flip(0)
            return mixed_loss(logits, label, second) / ROWS

        stage = PipelineStage(model, ctx.rank, ctx.world_size, ctx.device, group=ctx.group("pp"))
        schedule = Schedule1F1B(stage, MICRO, loss_fn=loss_of, scale_grads=False)
        if ctx.rank == 0:
            image = batch["image"]
            schedule.step(SHARE * image + (1 - SHARE) * image[batch["partner"]])
        elif ctx.rank == ctx.world_size - 1:
            schedule.step(target=target)
        else:
            schedule.step()


class Buggy(Clean):
    second_label_given = False


EXPECT = dict(
    right=[
        r"(?i)target|label|loss (function|itself)|criterion",
        r"(?i)micro.?batch|other rows?|another row|mix|second|partner|flip|order|permut|wrong|other|unlike|differ",
    ],
    place=[r"(?i)loss|target|label|last stage"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward|images? (is|are) mixed wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their) own|mean of means|factor of (1/)?[34]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)rows? .{0,20}(never read|read twice|dropped)",
        r"(?i)(wrong|other) micro.?batch .{0,30}(activation|input)",
        r"(?i)(classes|4\.back)\.bias (is|are) wrong",
    ],
)
WHY = (
    "Row i of 12 is mixed with row 11 - i; the loss takes as its second label that of the row mirrored within the micro-batch of 3 (rows 0, 1, 2 get the labels of 2, 1, 0 instead of 11, 10, 9). The second cross entropy, with the weight 0.3, "
    "therefore has wrong labels in all micro-batches, except where the two labels happen to be equal. Images, activations, logits of all stages are right (the forward is right up to the loss), the first labels (weight 0.7), the divisor 12 "
    "and the schedule too. The gradient that leaves the loss on the last stage (rank 2) is wrong, row by row, and so are those of the parameters of all three stages, in direction, but for two: the micro-batches 0 and 3, and 1 and 2, "
    "exchange their second labels, so the sum over the rows is right, and with it the bias of the classifier (5.classes.bias) and that of the last residual branch (4.back.bias), which only sees that sum. Fix: mix the labels with those of "
    "the full batch before the schedule cuts it, and give both as the target."
)
