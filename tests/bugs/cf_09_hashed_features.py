"""A click model with hashed categorical features: the bucket table cut over tp 2, rows over dp
2.

Every (field, value) pair is hashed by name into a table of 29 buckets, whose rows lie on two
ranks; the lookups are summed over the shards. A small network over the fields' vectors predicts
the click. Two micro-batches.

The bug: the collate function of the training step makes buckets with Python's own hash() of the
string, which is salted anew in every process, so ranks disagree about the bucket of a feature,
and so does whoever reads the table later. After feature hashing in data loaders (PYTHONHASHSEED
reports of several recommender and dictionary-building repositories).
"""

import zlib

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}

ROWS, BUCKETS, WIDTH = 11, 29, 5
FIELDS = ("site", "device", "hour", "campaign")


def bucket(field, value):
    return zlib.crc32(f"{field}={value}".encode()) % BUCKETS


def feature_bucket(field, value):
    return hash(f"{field}={value}") % BUCKETS


def collate(raw, to_bucket):
    ids = [[to_bucket(f, v) for f, v in zip(FIELDS, row, strict=True)] for row in raw.tolist()]
    return torch.tensor(ids, dtype=torch.int64)


class SumOverShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Buckets(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(BUCKETS, WIDTH))
        self.first, self.group = 0, None

    def forward(self, ids):
        local = ids - self.first
        known = (local >= 0) & (local < len(self.weight))
        found = self.weight[local.clamp(0, len(self.weight) - 1)] * known[..., None]
        return found if self.group is None else SumOverShards.apply(found, self.group)


class ClickModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = Buckets()
        self.deep = nn.Sequential(nn.Linear(len(FIELDS) * WIDTH, 7), nn.GELU(), nn.Linear(7, 1))

    def forward(self, ids):
        v = self.table(ids)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(-1)
        return self.deep(v.flatten(1)).squeeze(1) + 0.2 * pairs


class Clean:
    to_bucket = staticmethod(bucket)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 91)
        return ClickModel()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 92)
        return {
            "raw": torch.randint(6, (ROWS, len(FIELDS)), generator=g),
            "click": torch.randint(2, (ROWS,), generator=g).float(),
        }

    def click_loss(self, model, rows, to_bucket):
        logits = model(collate(rows["raw"], to_bucket))
        return nn.functional.binary_cross_entropy_with_logits(
            logits, rows["click"], reduction="sum"
        )

    def loss_sum(self, model, rows):
        return self.click_loss(model, rows, bucket), len(rows["raw"])

    def distribute(self, model, ctx):
        table, rank = model.table, ctx.coords["tp"]
        parts = table.weight.detach().tensor_split(2)
        table.first = sum(len(part) for part in parts[:rank])
        table.weight = nn.Parameter(parts[rank].clone())
        table.group = ctx.group("tp")
        return model

    def step(self, model, batch, ctx):
        own = {k: v.tensor_split(2)[ctx.coords["dp"]] for k, v in batch.items()}
        for index in range(2):
            piece = {k: v.tensor_split(2)[index] for k, v in own.items()}
            loss = self.click_loss(model, piece, self.to_bucket)
            (loss / len(batch["raw"])).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    to_bucket = staticmethod(feature_bucket)


EXPECT = dict(
    right=[
        r"hash|bucket",
        (
            r"salt|process|PYTHONHASHSEED|built.?in|python'?s|not (stable|deterministic|"
            r"the same|reproducible)|differ|crc32|random|disagree|other (id|bucket|row)s?|"
            r"wrong (id|bucket|row)s?"
        ),
    ],
    place=[r"feature_bucket", r"collate", r"to_bucket", r"\bhash\("],
    wrong=[
        r"collision",
        r"table\.first|offset of the shard",
        r"negative (bucket|index|hash)",
        r"SumOverShards (backward|should|must|lacks)",
        r"divided by|mean of means",
    ],
)
WHY = (
    "feature_bucket uses hash() of a string, which Python salts with a random number in every "
    "process (unless PYTHONHASHSEED is set), where bucket uses crc32. Each rank therefore maps "
    "the same feature to another row of the table; the two tp ranks of one row may both find a "
    "feature in their shard, or neither, and the sum is of two rows or none. All gradients are "
    "wrong, those of the table by rows, those of the network through its inputs, and differ "
    "even between tp ranks that should agree; divisor, shards and reductions are right. A right "
    "cause says that the buckets are not the same in all processes, because of Python's hash(). "
    "The fix is a stable hash such as crc32."
)
