"""DDP on five ranks with an own communication hook in the manner of FairScale's FSDP: the gradient is divided by a power of two before the sum and by the rest of the world size afterwards (against overflow). Two micro-batches per rank,
no_sync for the first; loss sum times ranks / all rows.

The bug: the rest is an integer division, world // before. For powers of two that is exact; five ranks give before = 2, after = 5 // 2 = 2, together 4 instead of 5. After facebookresearch/fairscale PR 565 (gradient predivide factor) and
DeepSpeed's gradient_predivide_factor (PR 996, 3630: a float, not an integer).
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 5}}}}
FEATURES, WIDTH, CLASSES = 4, 5, 3
CUTS = [0, 1, 3, 4, 5, 7, 8, 9, 10, 11, 13]
PARTS = [[(CUTS[i], CUTS[i + 1]), (CUTS[i + 1], CUTS[i + 2])] for i in range(0, 10, 2)]
ROWS = 13


def power_of_two_before(world):
    factor = 1
    while world % factor == 0 and world / factor > factor:
        factor *= 2
    return factor


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(FEATURES, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.inner(x))))


class Clean:
    whole = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FEATURES, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["label"], reduction="sum"), len(rows["label"])

    def distribute(self, model, ctx):
        model = DistributedDataParallel(model, process_group=ctx.group("dp"))
        before = power_of_two_before(ctx.world_size)
        after = ctx.world_size // before if self.whole else ctx.world_size / before

        def hook(group, bucket):
            buffer = bucket.buffer().div_(before)
            work = dist.all_reduce(buffer, group=group, async_op=True)
            return work.get_future().then(lambda done: done.value()[0].div_(after))

        model.register_comm_hook(ctx.group("dp"), hook)
        return model

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (self.loss_sum(model, rows)[0] * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    whole = True


EXPECT = dict(
    right=[
        r"(?i)5/4|1\.25|4/5|0\.8\b|five quarters|by 4\b.{0,30}5|4 instead of 5|25 ?%",
        r"(?i)divi|factor|scale|times|average|mean|large",
    ],
    place=[
        r"(?i)all parameters|every parameter|whole gradient|reduction|hook|all.?reduce|average|everything|all ranks|divisor"
    ],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)mean of means|divi(ded|des) by (its|their) own",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward|wrong (in )?direction",
        r"(?i)(only|alone).{0,20}(rank \d|inner|norm|head)|(rank \d|inner|norm|head).{0,10}(only|alone)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the (first|last) micro.?batch",
    ],
)
WHY = (
    "The hook divides by 2 before the sum and by 5 // 2 = 2 after it, together by 4 instead of by 5: on all five ranks every gradient of every parameter is 5/4 = 1.25 of the right one (pure scale, direction right), for all "
    "rows and micro-batches. The loss (times 5 / 13), no_sync and the sum itself "
    "are right. Fix: world / before (2.5)."
)
