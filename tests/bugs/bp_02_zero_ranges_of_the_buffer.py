"""A small depth network (convolutions on image patches) trained with a ZeRO style gradient buffer on three data parallel ranks: gradients of two micro-batches are accumulated, copied to one flat buffer in
reverse order of the parameters, the buffer is made of buckets, each padded to a multiple of the ranks, each bucket is reduce-scattered in place when it is complete. Then the shards that the ranks own are
gathered and copied back.

The bug: the ranges a rank owns are computed as one even piece of the whole buffer, but reduce-scatter was called bucket by bucket, which leaves a rank's sums in its piece of each bucket. What is read is in part
the rank's own unreduced gradient. After Megatron's distributed optimizer, whose gbuf ranges had to be made per bucket when buckets came (ParamAndGradBuffer, build_model_gbuf_range), and copies of it.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, SIDE, BUCKET = 8, 5, 90


class Depth(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.body = nn.Conv2d(6, 7, 3, padding=1)
        self.mix = nn.Conv2d(7, 5, 1)
        self.head = nn.Conv2d(5, 1, 1)

    def forward(self, x):
        x = torch.tanh(self.body(torch.tanh(self.stem(x))))
        return self.head(torch.tanh(self.mix(x)))[:, 0]


class GradBuffer:
    """Flat gradients of all parameters, in buckets [start, end) of lengths that the group divides."""

    def __init__(self, params, size):
        self.params, self.place, self.buckets = list(params)[::-1], [], []
        start = end = 0
        for p in self.params:
            self.place.append((end, end + p.numel()))
            end += p.numel()
            if end - start >= BUCKET or p is self.params[-1]:
                end += -(end - start) % size
                self.buckets.append((start, end))
                start = end
        self.data = self.params[0].new_zeros(end)

    def copy_in(self):
        for p, (lo, hi) in zip(self.params, self.place):
            self.data[lo:hi] = p.grad.flatten()

    def copy_out(self):
        for p, (lo, hi) in zip(self.params, self.place):
            p.grad.copy_(self.data[lo:hi].view_as(p))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Depth()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        depth = torch.rand(ROWS, SIDE, SIDE, generator=g)
        return {
            "image": torch.randn(ROWS, 3, SIDE, SIDE, generator=g),
            "depth": depth * (torch.rand(ROWS, SIDE, SIDE, generator=g) < 0.8),
        }

    def loss_sum(self, model, rows):
        known = rows["depth"] > 0
        error = (model(rows["image"]) - rows["depth"]).square()
        return (error * known).sum(), known.sum()

    def owned_ranges(self, buffer, rank, size):
        ranges = []
        for start, end in buffer.buckets:
            piece = (end - start) // size
            ranges.append((start + rank * piece, start + (rank + 1) * piece))
        return ranges

    def reduce_buckets(self, buffer, rank, group):
        size = dist.get_world_size(group)
        for start, end in buffer.buckets:
            bucket = buffer.data[start:end]
            piece = len(bucket) // size
            out = torch.empty_like(bucket[:piece])
            dist.reduce_scatter_tensor(out, bucket.clone(), group=group)
            bucket[rank * piece : (rank + 1) * piece] = out

    def gather_shards(self, buffer, rank, group):
        size = dist.get_world_size(group)
        own = torch.cat([buffer.data[a:b] for a, b in self.owned_ranges(buffer, rank, size)])
        shards = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(shards, own, group=group)
        for r, shard in enumerate(shards):
            at = 0
            for a, b in self.owned_ranges(buffer, r, size):
                buffer.data[a:b] = shard[at : at + b - a]
                at += b - a

    def step(self, model, batch, ctx):
        group, rank = ctx.group("dp"), ctx.coords["dp"]
        mine = {k: v.tensor_split(ctx.axes["dp"])[rank] for k, v in batch.items()}
        total = (batch["depth"] > 0).sum()
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            loss, _ = self.loss_sum(model, {k: v.tensor_split(2)[n] for k, v in mine.items()})
            (loss / total).backward()
        buffer = GradBuffer(model.parameters(), ctx.axes["dp"])
        buffer.copy_in()
        self.reduce_buckets(buffer, rank, group)
        self.gather_shards(buffer, rank, group)
        buffer.copy_out()


class Buggy(Clean):
    def owned_ranges(self, buffer, rank, size):
        piece = len(buffer.data) // size
        return [(rank * piece, (rank + 1) * piece)]


EXPECT = dict(
    right=[
        r"range|slice|piece|shard|offset|part(ition)?|position|bucket|elements",
        r"bucket|whole buffer|reduce.?scatter|un.?reduced|not reduced|never reduced|own (local )?gradient|local gradient|other (place|range|offset|layout)|one rank'?s? (own )?(gradient|part|contribution)|without the (other|sum)",
    ],
    place=[
        r"owned_ranges",
        r"gather_shards|all_gather",
        r"reduce_buckets|reduce_scatter",
        r"buffer|GradBuffer|bucket",
    ],
    wrong=[
        r"divisor|mean of means|world.?size (factor|too)|divided (twice|by)|own count",
        r"only the last micro.?batch|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
        r"forward.{0,20}(is )?wrong|(wrong|same) rows",
        r"last bucket (is )?never|(no|none of the) (gradient|parameter)s? (is|are|were) reduced",
    ],
)
WHY = (
    "Two buckets (432 and 168 elements) are reduce-scattered one by one, so rank r has the sums in the r-th third of every bucket. owned_ranges of the Buggy says the r-th third of the whole buffer; there, only the elements where both coincide are sums "
    "and the others are the one rank's own, unreduced gradients (of both micro-batches, over its own rows). These are gathered, so all ranks agree on gradients that are partly only one rank's contribution. A right cause must say that some "
    "elements are not reduced (a rank's own gradient) or that the ranges/shards read are not those the reduce-scatter wrote (bucket against whole buffer). Fix: ranges per bucket."
)
