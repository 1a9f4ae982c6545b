"""Data parallelism by hand: hooks add gradients into main_grad views of flat buckets, a bucket is all-reduced as soon as all of its parameters
are there in the last of two micro-batches. After Megatron's DistributedDataParallel with overlap_grad_reduce and reports on its bookkeeping.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, INPUTS, WIDTH, CLASSES, MICRO, SIZE = 8, 4, 7, 12, 9, 2, 5


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(INPUTS, WIDTH)
        self.recurrent = nn.GRUCell(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 17), nn.Linear(17, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        h, out = x.new_zeros(len(x), WIDTH), []
        for t in range(LENGTH):
            h = self.recurrent(torch.tanh(self.inside(x[:, t])), h)
            out.append(h)
        h = torch.stack(out, 1)
        return self.head(h + self.down(F.gelu(self.up(self.norm(h)))))


def position_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Bucket:
    def __init__(self, params):
        self.params, self.ready, self.buffer = params, 0, None

    def reset(self):
        """A new step: zeros, and every main_grad a view of them."""
        self.ready = 0
        self.buffer = self.params[0].new_zeros(sum(p.numel() for p in self.params))
        parts = self.buffer.split([p.numel() for p in self.params])
        for p, part in zip(self.params, parts, strict=True):
            p.main_grad = part.view_as(p)


class Reducer:
    def __init__(self, params, group, count):
        params = list(params)[::-1]
        self.group, self.last, self.count = group, False, count
        self.buckets = [Bucket(params[i : i + SIZE]) for i in range(0, len(params), SIZE)]
        for bucket in self.buckets:
            for p in bucket.params:
                p.register_post_accumulate_grad_hook(lambda p, b=bucket: self.arrived(p, b))

    def arrived(self, p, bucket):
        p.main_grad += p.grad
        p.grad = None
        self.count(self, bucket)
        if self.last and bucket.ready >= len(bucket.params):
            dist.all_reduce(bucket.buffer, group=self.group)
            bucket.ready = 0


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, LENGTH, INPUTS, generator=g),
            "labels": torch.randint(CLASSES, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows):
        return position_loss(model(rows["x"]), rows["labels"]), rows["labels"].numel()

    def distribute(self, model, ctx):
        model.reducer = Reducer(model.parameters(), ctx.group("dp"), self.count)
        return model

    def gradient_of(self, name, param, ctx):
        return param.main_grad

    @staticmethod
    def count(reducer, bucket):
        if reducer.last:
            bucket.ready += 1

    def step(self, model, batch, ctx):
        n, me = ctx.axes["dp"], ctx.coords["dp"]
        mine = {k: v.tensor_split(n)[me].tensor_split(MICRO) for k, v in batch.items()}
        for bucket in model.reducer.buckets:
            bucket.reset()
        for i in range(MICRO):
            model.reducer.last = i == MICRO - 1
            loss = position_loss(model(mine["x"][i]), mine["labels"][i])
            (loss / batch["labels"].numel()).backward()


class Buggy(Clean):
    @staticmethod
    def count(reducer, bucket):
        bucket.ready += 1


EXPECT = dict(
    right=[
        r"reduced|all.?reduce|reduction",
        r"early|before|late|micro|backward [12]|own|local|stay|not in|only",
    ],
    place=[r"recurrent|inside|norm|up\b|down|head|(all|every|each) (rank|param)|reduc"],
    wrong=[
        r"forward (is|goes|was) wrong|goes wrong in the forward",
        r"(never|not) (been )?all.?reduced|missing all.?reduc|is never reduced",
        r"do(es)? not read every row once|rows? .{0,20}(never|twice) read",
        r"backward of \S+ is wrong",
        r"divides? by (its|their) own",
    ],
)
WHY = (
    "The first micro-batch already counts the parameters as ready, so in the second the first parameter that arrives sets off the all-reduce of its "
    "bucket. What arrives later in that bucket is added after it: those parameters hold the sum over ranks of micro-batch 0 and their own rank's "
    "micro-batch 1 alone. The first to arrive in each bucket is right; forward and local gradients are right, and the ranks differ."
)
