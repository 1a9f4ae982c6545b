"""DDP over two nodes of two ranks with torch's post_localSGD_hook (warm-up: gradients averaged over all ranks; later: within the node). A regressor over short series; three micro-batches of unlike sizes per rank, every one of them
backward through DDP with synchronisation (no no_sync, the memory of local gradients is wanted elsewhere). The step belongs to the warm-up.

The bug: start_localSGD_iter is meant in optimizer steps (2), but PostLocalSGDState counts every backward pass that reaches the hook. After two micro-batches the hook leaves the warm-up inside the first step, and the third micro-batch
is averaged over the node alone. After the iteration count of pytorch PR #61206 (post-localSGD hook), issue #74157 there (post local SGD decreases accuracy), and Horovod's backward_passes_per_step (horovod PR #546).
"""

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"node": 2, "gpu": 2}}}}
SIZES = [[2, 1, 3], [1, 2, 2], [3, 1, 1], [1, 1, 4]]
LENGTH, WIDTH = 6, 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.Conv1d(2, WIDTH, 3)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 7)
        self.out = nn.Linear(7, 2)

    def forward(self, series):
        x = torch.tanh(self.filters(series)).mean(2)
        return self.out(F.silu(self.mix(self.norm(x))))


class Clean:
    warm_up = 1000

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = sum(map(sum, SIZES))
        return {
            "series": torch.randn(rows, 2, LENGTH, generator=g),
            "target": torch.randn(rows, 2, generator=g),
        }

    def loss_sum(self, model, rows):
        error = model(rows["series"]) - rows["target"]
        return F.huber_loss(error, torch.zeros_like(error), reduction="sum"), len(error)

    def distribute(self, model, ctx):
        everyone = ctx.group("node", "gpu")
        model = DistributedDataParallel(model, process_group=everyone)
        state = PostLocalSGDState(everyone, ctx.group("gpu"), self.warm_up)
        model.register_comm_hook(state, post_localSGD_hook)
        return model

    def step(self, model, batch, ctx):
        total = sum(map(sum, SIZES))
        low = sum(map(sum, SIZES[: ctx.rank]))
        for size in SIZES[ctx.rank]:
            rows = {k: v[low : low + size] for k, v in batch.items()}
            loss, _ = self.loss_sum(model, rows)
            (loss * ctx.world_size / total).backward()
            low += size


class Buggy(Clean):
    warm_up = 2


EXPECT = dict(
    right=[
        r"(?i)(last|third|3rd) micro.?batch|micro.?batch(es)? (no\. ?|number |index )?2\b|rows? "
        r".{0,60}(3.{0,3}5|9.{0,3}10)",
        r"(?i)node|gpu|sub.?group|half|other (two )?ranks|ranks? (0, ?1|2, ?3|0 and 1|2 and 3)|p"
        r"air",
        r"(?i)missing|absent|not (summed|reduced|averaged|exchanged|included)|only|alone|within|"
        r"instead of|"
        r"factor (of )?(2|0)|twice|doubl|diverg|differ|other group|wrong group",
    ],
    place=[r"(?i)hook|reduc|all.?reduce|average|DDP|sum over|\bnode\b|group"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong|differs)|goes wrong in the forward",
        r"(?i)(labels?|targets?|input) .{0,20}(is|are) (wrong|foreign|of another)",
        r"(?i)(first|second) micro.?batch .{0,25}(missing|lost|not reduced|wrong)",
        r"(?i)mean of means|divi(ded|des) by (its|their) own (rows|tokens|count)",
        r"(?i)backward of (a |the )?(Function|conv|norm|linear)",
        r"(?i)only (on )?rank [0-3]\b",
    ],
)
WHY = (
    "The state counts backward passes, not steps: micro-batches 0 and 1 are averaged over all four ranks (iter 0, 1), micro-batch 2 over the group of the node alone (axis gpu: ranks 0, 1 and ranks 2, 3). Loss is scaled by 4/22, "
    "the node's average divides by 2: so the rows of the third micro-batch count with factor 2 on the ranks of their own node and with 0 on the other node. Ranks 0 and 1 (rows 3-5 of rank 0, 9-10 of rank 1) miss rows 15 (rank 2) "
    "and 18-21 (rank 3) and count their own twice; ranks 2 and 3 the other way. All parameters are wrong, alike within a node and different between nodes. Forward, loss, divisor, the first two micro-batches are right. Fix: count "
    "optimizer steps (start_localSGD_iter times micro-batches), or use no_sync for all but the last micro-batch."
)
