"""A music language model over six residual codebooks on three ranks, codebook parallel: each rank holds two codebooks' embeddings and heads; the trunk (a GRU) is on all ranks, and so are the rows (three micro-batches of 2, 1 and 2). The
codebooks are laid out in the delay pattern: codebook k is k steps late. The embeddings of all codebooks are summed over the ranks, and every rank scores its own codebooks. The divisor is the number of all codes.

The bug: the delay is the number of the codebook on its rank, 0 and 1 everywhere, and not that in the model. After the delay pattern of MusicGen, huggingface/transformers pull requests 24109 (Add Musicgen) and 29802 (Add training
compatibility for Musicgen-like models), and parler-tts pull request 147 (Fix how delayed pattern mask is applied).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"books": 3}}}}
BOOKS, CODES, WIDTH, LENGTH, ROWS = 6, 5, 7, 4, 5
STEPS = LENGTH + BOOKS - 1
PARTS = [(0, 2), (2, 3), (3, 5)]


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ToAllRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def late(codes, delays, empty):
    """Codes (rows, books, length) with book n shifted to the right by delays[n]."""
    laid = codes.new_full((*codes.shape[:2], STEPS), empty)
    for n, delay in enumerate(delays):
        laid[:, n, delay : delay + codes.shape[2]] = codes[:, n]
    return laid


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Parameter(torch.randn(BOOKS, CODES + 1, WIDTH) * 0.6)
        self.trunk = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.heads = nn.Parameter(torch.randn(BOOKS, CODES, WIDTH) * 0.6)
        self.group, self.held, self.delays = None, slice(0, BOOKS), list(range(BOOKS))

    def cut(self, first, count, group):
        self.held, self.group = slice(first, first + count), group
        self.embed = nn.Parameter(self.embed.detach()[self.held].clone())
        self.heads = nn.Parameter(self.heads.detach()[self.held].clone())

    def forward(self, codes):
        codes = codes[:, self.held]
        laid = late(codes, self.delays, CODES)
        before = F.pad(laid[..., :-1], (1, 0), value=CODES)
        x = sum(F.embedding(before[:, n], table) for n, table in enumerate(self.embed))
        if self.group is not None:
            x = SumOverRanks.apply(x, self.group)
        x, _ = self.trunk(x)
        if self.group is not None:
            x = ToAllRanks.apply(x, self.group)
        scores = torch.einsum("rtd,ncd->rntc", x, self.heads)
        targets = late(codes, self.delays, -100)
        return F.cross_entropy(scores.flatten(0, 2), targets.flatten(), reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {"codes": torch.randint(CODES, (ROWS, BOOKS, LENGTH), generator=g)}

    def loss_sum(self, model, rows):
        return model(rows["codes"]), rows["codes"].numel()

    def delays_of(self, first, count):
        return list(range(first, first + count))

    def distribute(self, model, ctx):
        count = BOOKS // ctx.world_size
        first = ctx.rank * count
        model.cut(first, count, ctx.group("books"))
        model.delays = self.delays_of(first, count)
        return model

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        for low, high in PARTS:
            (model(batch["codes"][low:high]) / batch["codes"].numel()).backward()


class Buggy(Clean):
    def delays_of(self, first, count):
        return list(range(count))


EXPECT = dict(
    right=[
        r"(?i)embed|late|delay|before|laid|codebook|codes|targets?|trunk|position|sum over",
        r"(?i)forward|shift|delay|position|place|other (index|code|id|row|input)|argument|target|not at these places|belongs? to",
    ],
    place=[r"(?i)embed|late|delay|before|laid|targets?|codes|trunk"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|too (early|late)\b",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"(?i)rank 0 .{0,30}(shifts|lays|reads) .{0,25}wrong|backward formula",
        r"(?i)other rows|wrong rows|embed .{0,20}belongs to another codebook",
    ],
)
WHY = (
    "Net.delays is [0, 1] on every rank; right is [0, 1] on rank 0, [2, 3] on rank 1, [4, 5] on rank 2 (codebook k is k steps late). On ranks 1 and 2 `late` lays the codes 2 and 4 steps too early, both what goes into the embeddings (before) and "
    "the targets, in all micro-batches and rows. The first wrong value is the partial sum of embeddings on ranks 1 and 2 (their embedding indices at each step); rank 0's own part is right, the sum over ranks that goes into the trunk is "
    "wrong on all ranks. The targets of ranks 1 and 2 are at wrong steps, too. All gradients are wrong on all ranks. Sum, copy, cut of embeddings and heads, divisor 120 are right. Fix: delays = range(first, first + count)."
)
