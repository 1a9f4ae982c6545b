"""A small segmentation net with the Lovasz-softmax loss, taken per image and averaged over the
classes present in the image (pixels labelled 255 are left out). A pipeline by hand of two stages
(encoder, head) with three micro-batches of 2, 2 and 1 of 5 images.

Bug: the classes present are looked up once for the micro-batch, before the loop over its images.
For an image without one of them the term of the absent class (its largest probability) is added
and the mean is over too many classes. After "classes='present'" hoisted out of the per-image loop.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2}}}}
IMAGES, CHANNELS, WIDTH, CLASSES, HIGH, WIDE, IGNORED = 5, 2, 6, 4, 5, 6, 255


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, WIDTH, 3, padding=1)
        self.second = nn.Conv2d(WIDTH, WIDTH, 3, padding=2, dilation=2)
        self.norm = nn.GroupNorm(3, WIDTH)

    def forward(self, x):
        x = F.silu(self.first(x))
        return self.norm(x + self.second(x))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(WIDTH, WIDTH, 1)
        self.out = nn.Conv2d(WIDTH, CLASSES, 3, padding=1)

    def forward(self, x):
        return self.out(F.silu(self.mix(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = Encoder(), Head()

    def forward(self, x):
        return self.head(self.encoder(x))


def lovasz_weights(sorted_truth):
    total = sorted_truth.sum()
    intersection = total - sorted_truth.cumsum(0)
    union = total + (1 - sorted_truth).cumsum(0)
    jaccard = 1 - intersection / union
    return torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])


def class_term(chance, truth):
    errors, order = (truth - chance).abs().sort(descending=True)
    return errors @ lovasz_weights(truth[order])


def image_terms(chance, label, classes):
    """chance (classes, pixels), label (pixels): the mean of the classes' terms."""
    valid = label != IGNORED
    terms = [
        class_term(chance[c][valid], (label[valid] == c).to(chance.dtype)) for c in classes.tolist()
    ]
    return torch.stack(terms).mean()


def present(label):
    found = label.unique()
    return found[found != IGNORED]


def per_image(logits, labels):
    chances = logits.softmax(1).flatten(2)
    total = 0.0
    for chance, label in zip(chances, labels.flatten(1), strict=True):
        total = total + image_terms(chance, label, present(label))
    return total


def per_image_batched(logits, labels):
    chances, labels = logits.softmax(1).flatten(2), labels.flatten(1)
    classes = present(labels)
    total = 0.0
    for chance, label in zip(chances, labels, strict=True):
        total = total + image_terms(chance, label, classes)
    return total


class Clean:
    criterion = staticmethod(per_image)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 81)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 810)
        label = torch.randint(CLASSES, (IMAGES, HIGH, WIDE), generator=g)
        for i, gone in enumerate((1, 3, 0, 2, 1)):
            label[i][label[i] == gone] = (gone + 1) % CLASSES
        label[torch.rand(label.shape, generator=g) < 0.15] = IGNORED
        return {"image": torch.randn(IMAGES, CHANNELS, HIGH, WIDE, generator=g), "label": label}

    def loss_sum(self, model, rows):
        return per_image(model(rows["image"]), rows["label"]), rows["label"].shape[0]

    def distribute(self, model, ctx):
        if ctx.coords["pp"] == 0:
            del model.head
        else:
            del model.encoder
        return model

    def step(self, model, batch, ctx):
        group = ctx.group("pp")
        other = dist.get_global_rank(group, 1 - ctx.coords["pp"])
        parts = torch.arange(IMAGES).split(2)
        if ctx.coords["pp"] == 0:
            outs = [model.encoder(batch["image"][rows]) for rows in parts]
            for out in outs:
                dist.send(out.detach().contiguous(), other, group=group)
            for out in outs:
                grad = torch.empty_like(out)
                dist.recv(grad, other, group=group)
                out.backward(grad)
            return
        dtype = batch["image"].dtype
        received = [torch.empty(len(rows), WIDTH, HIGH, WIDE, dtype=dtype) for rows in parts]
        for x in received:
            dist.recv(x, other, group=group)
        for rows, x in zip(parts, received, strict=True):
            x.requires_grad_()
            loss = self.criterion(model.head(x), batch["label"][rows])
            (loss / IMAGES).backward()
            dist.send(x.grad, other, group=group)


class Buggy(Clean):
    criterion = staticmethod(per_image_batched)


EXPECT = dict(
    right=[
        r"class(es)?",
        r"present|absent|appear|occur|unique|found|missing from",
        r"micro.?batch|per.?image|each image|every image|of the image|whole batch|"
        r"batch.?(wide|level)|hoist|per_image_batched|before the loop",
    ],
    place=[r"per_image_batched", r"\bpresent\b", r"criterion", r"image_terms", r"\bclasses\b"],
    wrong=[
        r"ignor\w+.{0,40}(counted|not (masked|left out|filtered)|included)",
        r"(pipeline|send|recv|stage).{0,40}(order|wrong micro|mismatch|swapped)",
        r"(missing|never|twice).{0,20}all.?reduc",
        r"sort\w*.{0,30}(wrong|gradient)",
        r"(last|short) micro.?batch.{0,40}(weight|scale|mean)",
    ],
)
WHY = """The Lovasz-softmax of an image is the mean over the classes that its own (valid) labels
have. per_image_batched looks the classes up once for all labels of the micro-batch: images that
lack one of them get the term of an absent class (largest probability of it) and a mean over more
classes. Loss and all gradients (head and encoder) are wrong, except for the micro-batch of one. A
right cause says that present classes are taken over the micro-batch instead of each image. Fix:
present(label) within the loop."""
