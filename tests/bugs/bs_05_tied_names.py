"""Small language model with a head tied to the embedding, data parallel by hand with three ranks and two micro-batches; the gradients go into flat buckets of a given size and are summed bucket by bucket.
accelerate.utils.find_tied_parameters gives the groups of names of one Parameter, so that none gets into a bucket twice.

The bug: the whole groups are skipped instead of all but the first name, so that the tied weight is in no bucket and each rank keeps its own gradient for it.
After reports on tied weights lost from sharded / flattened buffers (Megatron-LM PR 6164, pytorch issue 176076) and code that uses find_tied_parameters for a list of names to ignore.
"""

import torch
import torch.distributed as dist
from accelerate.utils import find_tied_parameters
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
VOCABULARY, WIDTH, LENGTH, ROWS = 19, 6, 7, 8
BUCKET = 100


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.norm(self.gru(self.embed(ids))[0]))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        padding = torch.arange(LENGTH) >= lengths
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(padding, -100)}

    def loss_sum(self, model, rows):
        logits, labels = model(rows["ids"]).flatten(0, 1), rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()

    def repeated_names(self, model):
        return {name for names in find_tied_parameters(model) for name in names[1:]}

    def buckets(self, model):
        skip, bucket, size = self.repeated_names(model), [], 0
        for name, p in model.named_parameters(remove_duplicate=False):
            if name in skip:
                continue
            if bucket and size + p.numel() > BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(p)
            size += p.numel()
        if bucket:
            yield bucket

    def all_reduce_gradients(self, model, group):
        for bucket in self.buckets(model):
            flat = torch.cat([p.grad.flatten() for p in bucket])
            dist.all_reduce(flat, group=group)
            for p, g in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad.copy_(g.view_as(p))

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = (mine["labels"] != -100).sum()
        dist.all_reduce(count, group=group)
        model.zero_grad()
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            (self.loss_sum(model, part)[0] / count).backward()
        self.all_reduce_gradients(model, group)


class Buggy(Clean):
    def repeated_names(self, model):
        return {name for names in find_tied_parameters(model) for name in names}


EXPECT = dict(
    right=[
        r"(not|never|no|without|missing|skip|lacks|left out).{0,60}(reduc|sum|bucket|synchron|commun|collective|exchang)|own (contribution|gradient|part|rows).{0,30}(only|alone)|local gradient|(reduc|sum|bucket|collective).{0,40}(missing|lacks|skipp|left out|omit)",
        r"embed|tied|head\.weight|shared weight",
    ],
    place=[
        r"embed\.weight|head\.weight",
        r"repeated_names|buckets|all_reduce_gradients",
        r"find_tied|tied",
    ],
    wrong=[
        r"reduced twice|counted (twice|two times)|(summed|added) twice",
        r"micro.?batch.{0,30}(lost|dropped|overwritten)|mean of means|divisor|own count",
        r"(gru|norm).{0,60}(not|never) reduced|head\.bias.{0,30}(not|never) reduced",
    ],
)
WHY = (
    "repeated_names puts all names of a tied group into the set of names to skip, also the first one, so embed.weight (= head.weight) comes into no bucket and is never summed: each of the three ranks keeps the gradient of its own rows "
    "for it (both micro-batches, both uses), while gru, norm and head.bias are reduced rightly. The parts of the ranks add up to the right gradient. "
    "A right cause says that the tied weight's gradient is not reduced over dp on any rank. Fix: names[1:]."
)
