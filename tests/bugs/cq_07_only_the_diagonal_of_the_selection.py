"""A classifier that looks at three of seven patches (differentiable patch selection): a scorer,
perturbed top-k with noise handed in with the batch, attention over the chosen patches. DDP over
two ranks (4 and 3 of 7 images) with a communication hook that sums, micro-batches of two.

Perturbed top-k gives the mean over the samples of the one-hot rows of the top patches, in the
order of the patches. Its derivative by the scores is the mean of one-hot times noise / sigma: a
matrix over pairs (chosen patch, score).

Bug: the hand-written backward of the ranks keeps only pairs of a patch with itself. After the
published listing of perturbed top-k, whose einsum contracts both with the same index.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
IMAGES, PATCHES, FEATURES, K, SAMPLES, SIGMA, CLASSES = 7, 7, 5, 3, 6, 0.4, 3


def one_hot_of_the_top(scores, noise):
    """scores (n, patches), noise (n, samples, patches) -> (n, samples, k, patches)"""
    top = (scores[:, None] + SIGMA * noise).topk(K).indices.sort(-1).values
    return F.one_hot(top, scores.shape[-1]).to(scores.dtype)


class PerturbedTopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, noise):
        chosen = one_hot_of_the_top(scores, noise)
        ctx.save_for_backward(chosen, noise)
        return chosen.mean(1)

    @staticmethod
    def backward(ctx, g):
        chosen, noise = ctx.saved_tensors
        per_sample = torch.einsum("nkp,nskp->ns", g, chosen)
        return torch.einsum("ns,nsq->nq", per_sample, noise) / (SAMPLES * SIGMA), None


class PatchClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 1))
        self.embed = nn.Linear(FEATURES, 6)
        self.place = nn.Parameter(torch.randn(K, 6) / 2)
        self.mix = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, CLASSES)
        self.select = PerturbedTopK.apply

    def forward(self, patches, noise):
        chosen = self.select(self.score(patches)[..., 0], noise)
        h = torch.tanh(self.embed(chosen @ patches) + self.place)
        weights = (h @ self.mix(h).transpose(1, 2)).softmax(-1)
        return self.head((weights @ h).mean(1))


def summing_hook(group, bucket):
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 77)
        return PatchClassifier()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 770)
        return {
            "patches": torch.randn(IMAGES, PATCHES, FEATURES, generator=g),
            "noise": torch.randn(IMAGES, SAMPLES, PATCHES, generator=g),
            "label": torch.randint(CLASSES, (IMAGES,), generator=g),
        }

    def loss_sum(self, model, rows):
        out = model(rows["patches"], rows["noise"])
        return F.cross_entropy(out, rows["label"], reduction="sum"), rows["label"].numel()

    def distribute(self, model, ctx):
        group = ctx.group("dp")
        ddp = DistributedDataParallel(model, process_group=group)
        ddp.register_comm_hook(group, summing_hook)
        return ddp

    def step(self, model, batch, ctx):
        own = torch.arange(IMAGES).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]].split(2)
        for i, part in enumerate(own):
            with contextlib.nullcontext() if i + 1 == len(own) else model.no_sync():
                out = model(batch["patches"][part], batch["noise"][part])
                loss = F.cross_entropy(out, batch["label"][part], reduction="sum")
                (loss / IMAGES).backward()


class SelectPatches(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, noise):
        chosen = one_hot_of_the_top(scores, noise)
        ctx.save_for_backward(chosen, noise)
        return chosen.mean(1)

    @staticmethod
    def backward(ctx, g):
        chosen, noise = ctx.saved_tensors
        expected = torch.einsum("nskp,nsp->nkp", chosen, noise) / (SAMPLES * SIGMA)
        return torch.einsum("nkp,nkp->np", g, expected), None


class Buggy(Clean):
    def distribute(self, model, ctx):
        model.select = SelectPatches.apply
        return super().distribute(model, ctx)


EXPECT = dict(
    right=[
        r"backward|adjoint|derivative|jacobian|vjp|gradient of",
        r"SelectPatches|select|top.?k|score",
        r"diagonal|pair|cross|off-|other (patch|score)|einsum|same index|nsp|matrix|"
        r"wrong (backward|adjoint|derivative|vjp)|(backward|adjoint|derivative).{0,40}"
        r"(wrong|not|differ|incorrect)",
    ],
    place=[
        r"SelectPatches",
        r"model\.select|self\.select",
        r"score\.(0|2)",
        r"nskp,nsp->nkp",
        r"\bexpected\b",
    ],
    wrong=[
        r"(hook|DDP).{0,50}(averag|divid|mean|twice|missing|wrong)",
        r"no_sync.{0,50}(wrong|missing|last)",
        r"noise.{0,40}(differ|drawn|other rank|wrong rows|not the same)",
        r"forward.{0,30}(wrong|differs)",
        r"(embed|place|mix|head)\S* (is|are) wrong",
    ],
)
WHY = """The derivative of the mean one-hot Y[k, p] by the score q is mean_s 1[s, k, p] noise[s, q]
/ sigma, for all pairs p, q. SelectPatches.backward contracts the one-hot rows and the noise over
the same index ("nskp,nsp->nkp") and so keeps only p = q. The forward is right and so are embed,
place, mix and head; only the scorer (score.0, score.2) gets a wrong gradient. Fix: einsum
"nkp,nskp->ns" and then "ns,nsq->nq", as in PerturbedTopK."""
