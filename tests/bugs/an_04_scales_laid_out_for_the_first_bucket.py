"""DDP on three ranks (4, 2 and 3 rows, three micro-batches each, all of them synchronised) with a communication hook that brings every parameter's gradient to unit range before the average and back afterwards (powers of two, found from the
first bucket that comes; meant for a narrow wire format). A small regression network over sums of embeddings.

The bug: the hook spreads the scales into one flat vector per bucket and keeps it by the number of the bucket. DDP builds its buckets anew after the first backward, in the order in which the gradients were ready, so the kept vector belongs
to another
layout, while the scaling back goes by parameter. As in pytorch/pytorch PR 48670 and 48867 (PowerSGD error_dict: the buckets can be rebuilt, what is kept per bucket does not fit any more).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
WORDS, LENGTH, WIDTH = 8, 4, 6
PARTS = [[(0, 2), (2, 3), (3, 4)], [(4, 5), (5, 5), (5, 6)], [(6, 7), (7, 8), (8, 9)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(WORDS, WIDTH, mode="sum")
        self.first, self.norm = nn.Linear(WIDTH, 9), nn.LayerNorm(9)
        self.second, self.head = nn.Linear(9, 5), nn.Linear(5, 1)
        with torch.no_grad():
            self.head.weight.mul_(8)
            self.first.weight.mul_(0.3)

    def forward(self, words):
        x = torch.tanh(self.norm(self.first(self.embed(words))))
        return self.head(torch.tanh(self.second(x))).squeeze(-1)


class UnitRange:
    """Averages a bucket; every parameter's part is scaled by a power of two on the wire."""

    def __init__(self, group, keep):
        self.group, self.keep = group, keep
        self.scale, self.flat = {}, {}

    def scale_of(self, parameter, grad):
        if parameter not in self.scale:
            top = grad.abs().max()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.group)
            self.scale[parameter] = 2.0 ** -float(top.log2().floor()) if top > 0 else 1.0
        return self.scale[parameter]

    def flat_of(self, bucket):
        if not self.keep or bucket.index() not in self.flat:
            self.flat[bucket.index()] = torch.cat(
                [
                    torch.full_like(g, self.scale_of(p, g)).flatten()
                    for p, g in zip(bucket.parameters(), bucket.gradients())
                ]
            )
        return self.flat[bucket.index()]

    @staticmethod
    def hook(state, bucket):
        wire = bucket.buffer()
        wire.mul_(state.flat_of(bucket))
        dist.all_reduce(wire, group=state.group)
        wire.div_(dist.get_world_size(state.group))
        for parameter, grad in zip(bucket.parameters(), bucket.gradients()):
            grad.div_(state.scale_of(parameter, grad))
        future = torch.futures.Future()
        future.set_result(wire)
        return future


class Clean:
    keep = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        return {
            "words": torch.randint(WORDS, (rows, LENGTH), generator=g),
            "target": torch.randn(rows, generator=g) * 2,
        }

    def loss_sum(self, model, rows):
        return (model(rows["words"]) - rows["target"]).square().sum(), len(rows["target"])

    def distribute(self, model, ctx):
        model = DistributedDataParallel(model, process_group=ctx.group("dp"))
        model.register_comm_hook(UnitRange(ctx.group("dp"), self.keep), UnitRange.hook)
        return model

    def step(self, model, batch, ctx):
        count = len(batch["target"])
        for low, high in PARTS[ctx.rank]:
            # an empty part takes the first row with weight nought, to stay in step
            take = slice(low, max(high, low + 1))
            error = (model(batch["words"][take]) - batch["target"][take]).square().sum()
            (error * (high > low) * ctx.world_size / count).backward()


class Buggy(Clean):
    keep = True


EXPECT = dict(
    right=[
        r"(?i)reduc|bucket|comm\w* hook|hook|DDP|averag|synchron|exchange|collective"
        r"|after the backward",
        r"(?i)scal|multipl|factor|layout|order|element|rebuil|anew|mixed"
        r"|other parameter|overw|chang",
        r"(?i)second|later|after the first|micro.?batch|rebuil|bucket|layout|hook|element",
    ],
    place=[r"(?i)bucket|hook|DDP|reduc|averag"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(never|not) (been )?(all.?)?reduced|not summed|without (a )?(sum|reduction)",
        r"(?i)mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read)",
        r"(?i)only (on )?rank \d|rank \d alone|ranks (differ|disagree)",
        r"(?i)own (backward|adjoint) of|adjoint of .{0,30}(embed|norm|linear|first|second|head)",
        r"(?i)(rows|inputs|labels|targets) .{0,20}(are|is) (wrong|foreign|of another)",
    ],
)
WHY = (
    "Forward, losses and the local gradients of every rank are right; all ranks end with the same wrong gradient. The wrong happens in the comm hook, from the second synchronised micro-batch on. The first one (layout: order of "
    "registration) is right. "
    "Then DDP rebuilds its bucket in the order of readiness (head, second, norm, first, embed), and the kept flat vector of scales, of the same length, is laid over other parameters: an element of parameter p is multiplied by the "
    "scale of the parameter "
    "that stood at this place before, but divided by the scale of p. As DDP puts the accumulated gradient into the bucket, what was there from micro-batch 0 is multiplied too, and in micro-batch 2 once more. So single elements or "
    "stretches of a parameter "
    "are off by powers of two, others (same scale) are right. Divisor 9, rows, averaging over three ranks are right. Fix: lay out the scales anew from bucket.parameters(), or key by parameter."
)
