"""Click prediction with a DLRM-like model under DDP on three ranks, two micro-batches each of uneven size. A bottom MLP turns the dense features into one vector, four embedding bags give four more, and the dot products of all pairs of
the five vectors (below the diagonal) go with the dense vector into the top MLP. The interaction is a fused autograd Function. The divisor is the number of impressions of all ranks.

The bug: the backward puts the pairs' gradients into the lower triangle and multiplies with the vectors, without adding the transpose; of each pair only the later vector gets its part. After the fused dot interactions for DLRM
(dotBasedInteract of NVIDIA/DeepLearningExamples), whose backward mirrors the triangle before the product.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
TABLES, DENSE, WIDTH, PER_BAG, ROWS = [7, 5, 9, 6], 4, 5, 3, 13
PARTS = [[(0, 3), (3, 5)], [(5, 6), (6, 9)], [(9, 11), (11, 13)]]


class Interaction(torch.autograd.Function):
    """Dot products of all pairs (i, j), j < i, of the vectors x (rows, vectors, width)."""

    @staticmethod
    def forward(ctx, x, both):
        ctx.save_for_backward(x)
        ctx.both = both
        i, j = torch.tril_indices(x.shape[1], x.shape[1], -1)
        return (x @ x.transpose(1, 2))[:, i, j]

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        i, j = torch.tril_indices(x.shape[1], x.shape[1], -1)
        square = x.new_zeros(len(x), x.shape[1], x.shape[1])
        square[:, i, j] = grad
        if ctx.both:
            square = square + square.transpose(1, 2)
        return square @ x, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = True
        self.bottom = nn.Sequential(nn.Linear(DENSE, 6), nn.SiLU(), nn.Linear(6, WIDTH))
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, WIDTH, mode="sum") for n in TABLES)
        pairs = (len(TABLES) + 1) * len(TABLES) // 2
        self.top = nn.Sequential(nn.Linear(pairs + WIDTH, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, dense, sparse):
        first = self.bottom(dense)
        bags = [table(sparse[:, n]) for n, table in enumerate(self.tables)]
        pairs = Interaction.apply(torch.stack([first, *bags], 1), self.both)
        return self.top(torch.cat([first, pairs], 1)).squeeze(1)


class Clean:
    both = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        sparse = [torch.randint(n, (ROWS, PER_BAG), generator=g) for n in TABLES]
        return {
            "dense": torch.randn(ROWS, DENSE, generator=g),
            "sparse": torch.stack(sparse, 1),
            "click": torch.randint(2, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        scores = model(rows["dense"], rows["sparse"])
        click = rows["click"].to(scores.dtype)
        loss = F.binary_cross_entropy_with_logits(scores, click, reduction="sum")
        return loss, len(click)

    def distribute(self, model, ctx):
        model.both = self.both
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss, _ = self.loss_sum(model, rows)
                (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    both = False


EXPECT = dict(
    right=[
        r"(?i)Interaction|bottom|tables?|dot",
        r"(?i)backward|adjoint|gradient (of|that)|hands? (back|on)",
    ],
    place=[r"(?i)Interaction|bottom|tables?"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)\btop(\.\d)?(\.(weight|bias))? (is|are) wrong",
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted twice|too (early|late)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|recomput|labels? .{0,20}(is|are) wrong",
    ],
)
WHY = (
    "The forward is right everywhere; the backward of Interaction is wrong on all ranks, rows and micro-batches: for a pair (i, j), j < i, the gradient goes to vector i (times vector j) and not to vector j (times vector i). Vector 0 "
    "(dense, bottom MLP) gets nothing from the interactions, only its direct part into the top MLP; tables 0, 1 and 2 (vectors 1, 2, 3) get only the pairs with earlier vectors; table 3 (vector 4, the last) is right. So the gradients "
    "of bottom and of tables.0, 1, 2 are wrong, those of tables.3 and top right, equally on all ranks after DDP's average. Divisor 13, no_sync, data, reduction are right. Fix: square + square.transpose(1, 2) before the product with "
    "x."
)
