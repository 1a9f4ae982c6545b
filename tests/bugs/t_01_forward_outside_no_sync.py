"""DDP with a comm hook that sums, three micro-batches per step under `no_sync`; unlike rows and unlike labelled tokens on the ranks.
After the reports on gradient accumulation with DistributedDataParallel.no_sync and where the forward has to stand.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WIDTH, VOCAB, MICRO = 17, 6, 9, 13, 3


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.conv = nn.Conv1d(WIDTH, 11, 3, padding=1)
        self.norm = nn.LayerNorm(11)
        self.hidden, self.head = nn.Linear(11, 15), nn.Linear(15, 7)

    def forward(self, tokens):
        h = self.conv(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        return self.head(F.gelu(self.hidden(self.norm(h))))


def tagging_loss(logits, tags):
    return F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=-100, reduction="sum")


def summing_hook(group, bucket):
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda f: f.value()[0])


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Tagger()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tags = torch.randint(7, (ROWS, LENGTH), generator=g)
        tags[torch.rand(ROWS, LENGTH, generator=g) < 0.3] = -100
        tags[:, 0] = 1
        return {"tokens": torch.randint(VOCAB, (ROWS, LENGTH), generator=g), "tags": tags}

    def loss_sum(self, model, rows):
        return tagging_loss(model(rows["tokens"]), rows["tags"]), (rows["tags"] != -100).sum()

    def distribute(self, model, ctx):
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(None, summing_hook)
        return ddp

    def micro_step(self, model, tokens, tags, count, last):
        with contextlib.nullcontext() if last else model.no_sync():
            loss = tagging_loss(model(tokens), tags) / count
            loss.backward()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = (mine["tags"] != -100).sum()
        dist.all_reduce(count)
        parts = zip(
            mine["tokens"].tensor_split(MICRO), mine["tags"].tensor_split(MICRO), strict=True
        )
        for i, (tokens, tags) in enumerate(parts):
            self.micro_step(model, tokens, tags, count, i == MICRO - 1)


class Buggy(Clean):
    def micro_step(self, model, tokens, tags, count, last):
        loss = tagging_loss(model(tokens), tags) / count
        with contextlib.nullcontext() if last else model.no_sync():
            loss.backward()


EXPECT = dict(
    right=[
        r"reduc|sync|summed|added up",
        r"(every|each) (micro|backward|call)|again|twice|too early|early|several times|repeated|more than once|"
        r"(3|9|three|nine) times|(factors?|weights?) .{0,30}\b[39]\b|\b9\b.{0,20}\b3\b|before (the )?(last|later)",
    ],
    place=[r"no_sync|micro.?batch|all.?reduce|hook|bucket|backward|reduc"],
    wrong=[
        r"forward (is|goes|was) wrong|goes wrong in the forward",
        r"(is|are|was|were) (never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"do(es)? not read every row once|rows? .{0,20}(never|twice) read",
        r"divid\w+ by (its|their) own count|own number of (tokens|labels)",
        r"backward of \S*(embed|conv|norm|hidden|head)\S* is wrong",
        r"gradient of other targets",
    ],
)
WHY = (
    "Only the backward stands inside `no_sync`, the forward outside it; DDP decides in the forward whether the next backward is reduced, so all three "
    "backwards of all ranks are all-reduced. The hook sums and `.grad` holds the reduced sum of the earlier micro-batches, so that is summed over the "
    "three ranks again: micro-batch 1 counts 9 times, 2 counts 3 times, 3 once. On all ranks and in all parameters alike; every forward, loss, divisor and "
    "backward is right. Right: the forward inside `no_sync`, one reduction after the last micro-batch."
)
