"""A DETR-like detector under DDP: class loss over all queries, box losses over the boxes of all ranks. After DETR's `num_boxes`
(all_reduce, divide by the world size, clamp to 1) and its many ports (avg_factor / reduce_mean in mmdetection): the clamp against an
empty batch comes before the sum, and one rank has no boxes.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, CELLS, CHANNELS, WIDTH, QUERIES, CLASSES = 8, 6, 5, 8, 4, 5


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.Linear(CHANNELS, WIDTH)
        self.queries = nn.Parameter(torch.randn(QUERIES, WIDTH))
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.norm, self.ffn = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.classes = nn.Linear(WIDTH, CLASSES)
        self.boxes = nn.Sequential(nn.Linear(WIDTH, 7), nn.ReLU(), nn.Linear(7, 4))

    def forward(self, x):
        memory = torch.tanh(self.cells(x))
        k, v = self.kv(memory).chunk(2, -1)
        q = self.q(self.queries).expand(len(x), -1, -1)
        h = self.queries + F.scaled_dot_product_attention(q, k, v)
        h = h + F.gelu(self.ffn(self.norm(h)))
        return self.classes(h), self.boxes(h).sigmoid()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "classes": lambda m, r: (self.sums(m(r["x"]), r)[0], r["kind"].numel()),
            "l1": lambda m, r: (5.0 * self.sums(m(r["x"]), r)[1], (r["kind"] > 0).sum()),
            "size": lambda m, r: (2.0 * self.sums(m(r["x"]), r)[2], (r["kind"] > 0).sum()),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return Detector()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        kind = torch.randint(1, CLASSES, (ROWS, QUERIES), generator=g)
        number = torch.tensor([1, 0, 2, 1, 3, 1, 0, 0])[:, None]
        return {
            "x": torch.randn(ROWS, CELLS, CHANNELS, generator=g),
            "kind": kind * (torch.arange(QUERIES) < number),
            "box": torch.rand(ROWS, QUERIES, 4, generator=g),
        }

    @staticmethod
    def sums(out, rows):
        (logits, boxes), there = out, rows["kind"] > 0
        classes = F.cross_entropy(logits.flatten(0, 1), rows["kind"].flatten(), reduction="sum")
        l1 = (boxes - rows["box"]).abs().sum(-1)
        area = (boxes[..., 2:].prod(-1) - rows["box"][..., 2:].prod(-1)).square()
        return classes, (l1 * there).sum(), (area * there).sum()

    def loss_sum(self, model, rows):
        classes, l1, size = self.sums(model(rows["x"]), rows)
        number = (rows["kind"] > 0).sum().clamp(min=1)
        n = rows["kind"].numel()
        return classes + n * (5.0 * l1 + 2.0 * size) / number, n

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def num_boxes(self, own, ctx):
        dist.all_reduce(own)
        return (own / ctx.world_size).clamp(min=1)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        classes, l1, size = self.sums(model(mine["x"]), mine)
        number = self.num_boxes((mine["kind"] > 0).sum(), ctx)
        loss = classes * ctx.world_size / batch["kind"].numel()
        (loss + 5.0 * l1 / number + 2.0 * size / number).backward()


class Buggy(Clean):
    def num_boxes(self, own, ctx):
        own = own.clamp(min=1)
        dist.all_reduce(own)
        return own / ctx.world_size


EXPECT = dict(
    right=[
        r"\bl1\b|\bsize\b|box\w*",
        r"8/9|0\.88\d+|\b9\b|count\w*|divi\w+|normali[sz]\w*|factor|scaled?|too small|weigh\w*",
    ],
    place=[r"\bl1\b", r"\bsize\b", r"box\w*", r"(all|every|each) ranks?"],
    wrong=[
        r"classes (term )?(is|was) (wrong|scaled|too small|too large)",
        r"(never|not) (been )?(all.?)?(reduced|averaged)",
        r"(counted|reduced|summed) (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (wrong|different)",
        r"gradients? of rank \W?2 (is|are) (missing|lost)",
    ],
)
WHY = (
    "Rank 2 has no boxes and adds 1 to the count, so both box terms (l1, size) are divided by 9 instead of 8 boxes: their part of every "
    "gradient is 8/9 of what it should be, on all ranks. The class term is right, and so is the forward."
)
