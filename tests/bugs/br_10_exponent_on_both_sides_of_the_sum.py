"""Image retrieval with generalised mean pooling, (mean of x^p)^(1/p) with a learned exponent for each channel. Ten image rows are cut over three ranks (4, 3 and 3); each pools its strip, the sums are added over the ranks,
and every rank computes root, head and loss alike. Gradients of what works on strips are summed over the ranks, those of the head are complete on each. Two micro-batches.

The bug: the exponent works on the strips (x^p) and after the sum (the root). Its gradient is summed over the ranks whole, like the backbone's, so the part of the root, which every rank has complete,
counts three times. After spatial parallel training, where parameters are sorted into "to be summed" and "complete" by module.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"strip": 3}}}}
ROWS, HEIGHT, BREADTH, COLOURS, CHANNELS, CLASSES = 7, 10, 4, 3, 5, 4


class GeM(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.linspace(1.7, 3.1, CHANNELS))

    def powers(self, x, p):
        return (x ** p[:, None, None]).sum((2, 3))

    def root(self, sums):
        return (sums / (HEIGHT * BREADTH)) ** (1 / self.p)


class Retrieval(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(COLOURS, 6, 1), nn.GELU(), nn.Conv2d(6, CHANNELS, 1), nn.Softplus()
        )
        self.pool = GeM()
        self.head = nn.Linear(CHANNELS, CLASSES)


class AddStrips(torch.autograd.Function):
    """The sum over the ranks, from which all go on alike."""

    @staticmethod
    def forward(fctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class EnterStrips(torch.autograd.Function):
    """A replicated value goes into work on strips: its gradient is the sum of theirs."""

    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Retrieval()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(ROWS, COLOURS, HEIGHT, BREADTH, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        sums = model.pool.powers(model.backbone(rows["image"]), model.pool.p)
        logits = model.head(4 * model.pool.root(sums))
        return F.cross_entropy(logits, rows["label"], reduction="sum"), len(logits)

    def pooled(self, pool, features, group):
        p = EnterStrips.apply(pool.p, group)
        return pool.root(AddStrips.apply(pool.powers(features, p), group))

    def finish_gradients(self, model, group):
        for p in model.backbone.parameters():
            dist.all_reduce(p.grad, group=group)

    def step(self, model, batch, ctx):
        group = ctx.group("strip")
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            image, label = (batch[k].tensor_split(2)[n] for k in ("image", "label"))
            strip = image.tensor_split(ctx.world_size, dim=2)[ctx.rank]
            logits = model.head(4 * self.pooled(model.pool, model.backbone(strip), group))
            (F.cross_entropy(logits, label, reduction="sum") / ROWS).backward()
        self.finish_gradients(model, group)


class Buggy(Clean):
    def pooled(self, pool, features, group):
        return pool.root(AddStrips.apply(pool.powers(features, pool.p), group))

    def finish_gradients(self, model, group):
        for module in (model.backbone, model.pool):
            for p in module.parameters():
                dist.all_reduce(p.grad, group=group)


EXPECT = dict(
    right=[
        r"pool\.p|exponent|\bGeM\b|\bpool\b|root",
        r"(three|3) times|3x|x ?3|world.?size|group.?size|number of ranks|too (often|many)|counted|multipl|replicat|complete|identical|same on|already|again|times|once (on|for|per) (each|every)|over.?count",
        r"sum|reduc|add(ed|s)?\b",
    ],
    place=[r"pool\.p\b", r"finish_gradients", r"\bpooled\b", r"\broot\b|AddStrips|powers"],
    wrong=[
        r"(not|never) (reduced|summed)|missing (all.?)?reduc|mean of means|wrong divisor|wrong group",
        r"backbone.{0,40}(is|are) wrong|head.{0,40}(is|are) wrong|own strip'?s? (mean|statistic)|reduced twice",
        r"whole gradient of .{0,12}pool\.p.{0,30}(3|three) times",
    ],
)
WHY = (
    "pool.p gets a gradient from x^p, of which each rank has its strip's part, and from the root (mean)^(1/p), which all three ranks compute alike and complete (AddStrips hands the gradient back as it is). The buggy step "
    "uses p on both sides as it is and sums its gradient over the ranks with the backbone's: the strips' parts add up rightly, the root's part counts three times. Only pool.p is wrong, on all ranks alike, by twice the "
    "root's part; backbone, head, loss are right. A right cause says that a replicated part of pool.p's gradient (the root's) is multiplied by the sum. Fix: EnterStrips before x^p, and p not summed."
)
