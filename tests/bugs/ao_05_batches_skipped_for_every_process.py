"""Resuming in the middle of an accumulation window with accelerate under DDP on three ranks: each rank has a DataLoader over its own rows (9, 9 and 7; a BatchSampler, batches of 2, the last of 1). The first batch of the window runs alone
(shapes are probed on it), the others come from accelerate's skip_first_batches of the same loader; all but the last batch under no_sync. A small tabular network with a Huber loss; divisor: all rows.

The bug: the author takes the loader's batches for batches of all processes and skips one for each process, num_batches = 1 * world size. The loader of a rank counts its own batches, so two more batches are passed over on each rank. After
the discussions of skip_first_batches in huggingface/accelerate #1451 and #2016 and huggingface/transformers #21390.
"""

import contextlib

import torch
from accelerate.data_loader import skip_first_batches
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
FEATURES, KINDS, WIDTH = 5, 7, 8
PARTS = [(0, 9), (9, 18), (18, 25)]


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind = nn.Embedding(KINDS, 4)
        self.inner = nn.Linear(FEATURES + 4, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x, kind):
        h = torch.cat([x, self.kind(kind)], 1)
        return self.out(F.silu(self.norm(self.inner(h))))[:, 0]


def table_loss(model, rows):
    guess = model(rows["x"], rows["kind"])
    return F.huber_loss(guess, rows["y"].to(guess.dtype), reduction="sum")


class OwnRows(torch.utils.data.Dataset):
    def __init__(self, batch, low, high):
        self.batch, self.low, self.high = batch, low, high

    def __len__(self):
        return self.high - self.low

    def __getitem__(self, i):
        return {k: v[self.low + i] for k, v in self.batch.items()}


class Clean:
    per_process = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Table()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][1]
        return {
            "x": torch.randn(rows, FEATURES, generator=g),
            "kind": torch.randint(KINDS, (rows,), generator=g),
            "y": torch.randn(rows, generator=g) * 2,
        }

    def loss_sum(self, model, rows):
        return table_loss(model, rows), len(rows["x"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        count = len(batch["x"])
        own = OwnRows(batch, *PARTS[ctx.rank])
        loader = DataLoader(own, batch_sampler=BatchSampler(SequentialSampler(own), 2, False))
        first = next(iter(loader))
        with model.no_sync():
            (table_loss(model, first) * ctx.world_size / count).backward()
        done = 1
        rest = skip_first_batches(loader, done * ctx.world_size if self.per_process else done)
        batches = list(rest)
        for turn, rows in enumerate(batches):
            with contextlib.nullcontext() if turn == len(batches) - 1 else model.no_sync():
                (table_loss(model, rows) * ctx.world_size / count).backward()


class Buggy(Clean):
    per_process = True


EXPECT = dict(
    right=[
        r"(?i)rows?|batch|data|sample|input",
        r"(?i)skip|never|not (read|used|seen|in)|miss|lost|lack|drop|left out|absent|pass(es|ed) over|without|no (part|contribution|gradient)|does not reach",
        r"(?i)row|batch|sample|skip",
    ],
    place=[r"(?i)rows? (\d|2|11|20)|skip|loader|micro.?batch|batch(es)? [1-4]|rank"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) twice|counted twice",
        r"(?i)mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)forward.{0,20}(is|goes) wrong|wrong in the backward",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)(kind|inner|norm|out)\.(weight|bias) (is|are) (not|never)",
        r"(?i)rows? .{0,30}(read|counted|used) (twice|by (two|both|several) ranks)",
    ],
)
WHY = (
    "All three ranks skip three of their own batches instead of one after the first has been done: the batches 1 and 2 of every rank are never read, rows 2-5 on rank 0, 11-14 on rank 1, 20-23 on rank 2 (12 of 25 rows); rows 0, 1, "
    "6-8, 9, 10, 15-17, 18, 19, 24 have their right part. All parameters are wrong on all ranks equally. The divisor (25, from the whole batch), forward, backward, no_sync and DDP's average are right. Fix: "
    "skip_first_batches(loader, 1): the loader of a rank counts the rank's own batches."
)
