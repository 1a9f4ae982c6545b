"""A picture classifier for pictures of any shape under FSDP2 (fully_shard of the block and the root) on three ranks, two micro-batches each; all pictures of a micro-batch have one shape. A patch gets the embedding of its line and that
of its column; the lists of lines and columns are made once and kept. Gradients are reduced in the last micro-batch; divisor: pictures of all ranks.

The bug: the lists are kept under the number of patches, so a picture of 3 x 4 patches gets the places of the 2 x 6 one that came before. After tatp22/multidim-positional-encoding PR 19 (Add a caching layer to posenc), whose cache goes
by shape, and the key (enc_ind, h, w) in LibreYOLO/libreyolo PR 541.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
LONGEST, PIXELS, WIDTH, CLASSES = 12, 5, 8, 4
SHAPES = [(2, 6)] * 2 + [(3, 4)] * 3 + [(4, 3)] + [(2, 5)] * 3 + [(5, 2)] * 2
PARTS = [[(0, 2), (2, 5)], [(5, 6), (6, 8)], [(8, 9), (9, 11)]]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.joint, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.joint(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(o.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.kept = None, {}
        self.patch = nn.Linear(PIXELS, WIDTH)
        self.line, self.column = nn.Embedding(6, WIDTH), nn.Embedding(6, WIDTH)
        self.block = Block()
        self.classes = nn.Linear(WIDTH, CLASSES)

    def places(self, height, width):
        if self.key is None:
            return self.grid(height, width)
        key = self.key(height, width)
        if key not in self.kept:
            self.kept[key] = self.grid(height, width)
        return self.kept[key]

    def grid(self, height, width):
        line, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        return line.flatten(), column.flatten()

    def forward(self, patches, height, width):
        line, column = self.places(height, width)
        x = self.patch(patches) + self.line(line) + self.column(column)
        return self.classes(torch.tanh(self.block(x)).mean(1))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    @staticmethod
    def key(height, width):
        return height, width

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(SHAPES)
        return {
            "patches": torch.randn(rows, LONGEST, PIXELS, generator=g),
            "shape": torch.tensor(SHAPES),
            "label": torch.randint(CLASSES, (rows,), generator=g),
        }

    def loss_sum(self, model, rows):
        loss = 0.0
        for n, (height, width) in enumerate(rows["shape"].tolist()):
            scores = model(rows["patches"][n : n + 1, : height * width], height, width)
            loss = loss + F.cross_entropy(scores, rows["label"][n : n + 1], reduction="sum")
        return loss, len(rows["label"])

    def distribute(self, model, ctx):
        model.key, model.kept = self.key, {}
        fully_shard(model.block, mesh=ctx.mesh)
        fully_shard(model, mesh=ctx.mesh)
        return model

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            height, width = batch["shape"][low].tolist()
            model.set_requires_gradient_sync(turn == len(parts) - 1)
            scores = model(batch["patches"][low:high, : height * width], height, width)
            loss = F.cross_entropy(scores, batch["label"][low:high], reduction="sum")
            (loss * ctx.world_size / len(SHAPES)).backward()


class Buggy(Clean):
    @staticmethod
    def key(height, width):
        return height * width


EXPECT = dict(
    right=[
        r"(?i)\bline\b|\bcolumn\b|places|position|grid|input|embedding|cache|kept",
        r"(?i)micro.?batch(es)? (1|2|[^.]{0,20}(after|but|except|later|second|further|last))|after the first|later micro|second micro|"
        r"from micro.?batch|not the first|left (over|behind|on)|previous|earlier|stale|kept|cache|rows 2|rows 9",
        r"(?i)forward|input|index|indices|position|place|state|stale|kept|cache|left",
    ],
    place=[r"(?i)\bline\b|\bcolumn\b|places|position|grid"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|(gradient )?sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)rank 1.{0,25}(goes|is) wrong|all micro.?batch.{0,20}wrong|first micro.?batch.{0,25}(goes|is) wrong",
        r"(?i)labels? .{0,20}(is|are) wrong|detach|recomput|dropout",
        r"(?i)forward is right|goes wrong (first |only )?in the backward",
    ],
)
WHY = (
    "The lists of lines and columns are kept under height * width. Rank 0: micro-batch 0 has 2 x 6 pictures (right, 12 patches), micro-batch 1 (rows 2 to 4) has 3 x 4 pictures and gets the lists of 2 x 6. Rank 2: micro-batch 0 is 2 x 5 "
    "(right), micro-batch 1 (rows 9, 10) is 5 x 2 and gets the lists of 2 x 5. Rank 1 has 4 x 3 and 2 x 5 (12 and 10 patches): right. The forward goes wrong at the inputs of the embeddings line and column; patch is right; everything "
    "after is wrong for those rows, so all gradients are. What is kept is left from an earlier micro-batch (at step 2 from step 1, with the same content). Sharding, sync, divisor 11, labels right. Fix: key (height, width)."
)
