"""A small gated recurrent tagger under DDP on five ranks with a hierarchical communication hook: ranks 0-2 stand on one node, ranks 3 and 4 on another. The hook reduces every bucket inside the node, then between the two node leaders
(ranks 0 and 3), then broadcasts inside the node. Two micro-batches per rank, the first under no_sync; the loss is scaled by the world size over the number of tokens of all ranks, as DDP's average wants.

The bug: the hook averages twice, over the ranks of the node and over the nodes, which is the average over all ranks only if all nodes have the same number of ranks. Of our own making, written like the hierarchical averaging asked for
in pytorch/pytorch issue 71325 and the hierarchical all-reduce of Horovod (horovod/horovod PR 411, homogeneous nodes assumed), on an allocation with unequal nodes.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 5}}}}
NODES = [[0, 1, 2], [3, 4]]
ROWS, TOKENS, VOCABULARY, WIDTH, TAGS = 13, 5, 9, 6, 4
PARTS = [
    [(0, 2), (2, 3)],
    [(3, 4), (4, 6)],
    [(6, 7), (7, 8)],
    [(8, 10), (10, 11)],
    [(11, 12), (12, 13)],
]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.tags = nn.Linear(WIDTH, TAGS)

    def forward(self, ids):
        return self.tags(self.norm(self.recurrent(self.embed(ids))[0]))


class Levels:
    """Reduces inside the node, between the leaders, and hands the result out inside the node."""

    def __init__(self, rank, mean_of_means):
        self.mean_of_means = mean_of_means
        self.groups = [dist.new_group(node) for node in NODES]
        self.leaders = dist.new_group([node[0] for node in NODES])
        self.number = next(i for i, node in enumerate(NODES) if rank in node)
        self.leader = NODES[self.number][0]

    def __call__(self, state, bucket):
        flat, inside = bucket.buffer(), self.groups[self.number]
        dist.all_reduce(flat, group=inside)
        if self.mean_of_means:
            flat /= len(NODES[self.number])
        if dist.get_rank() == self.leader:
            dist.all_reduce(flat, group=self.leaders)
            flat /= len(NODES) if self.mean_of_means else dist.get_world_size()
        dist.broadcast(flat, self.leader, group=inside)
        done = torch.futures.Future()
        done.set_result(flat)
        return done


class Clean:
    mean_of_means = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Tagger()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
            "tags": torch.randint(TAGS, (ROWS, TOKENS), generator=g),
        }

    def loss_sum(self, model, rows):
        scores = model(rows["ids"])
        loss = F.cross_entropy(scores.flatten(0, 1), rows["tags"].flatten(), reduction="sum")
        return loss, rows["tags"].numel()

    def distribute(self, model, ctx):
        model = DistributedDataParallel(model, process_group=ctx.group("dp"))
        model.register_comm_hook(None, self.hook(ctx))
        return model

    def hook(self, ctx):
        levels = Levels(ctx.rank, self.mean_of_means)

        def reduce_in_levels(
            state: object, bucket: dist.GradBucket
        ) -> torch.futures.Future[torch.Tensor]:
            return levels(state, bucket)

        return reduce_in_levels

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss, _ = self.loss_sum(model, rows)
                (loss * ctx.world_size / (ROWS * TOKENS)).backward()


class Buggy(Clean):
    mean_of_means = True


EXPECT = dict(
    right=[
        r"(?i)rank|replica|node|group",
        r"(?i)weigh|factor|scal|divi|averag|mean|coefficient|too (large|small)|5/6|5/4|0?\.83"
        r"|1\.25",
        r"(?i)\b5 ?/ ?6|\b5 ?/ ?4|0?\.833|1\.25|node|mean of (the )?means"
        r"|averag\w+ of (the )?averag|group\w* of (unequal|different|uneven)"
        r"|(unequal|uneven|different)\w* (group|node|size|weight)"
        r"|ranks? 0.{0,12}2\b.{0,90}ranks? 3",
    ],
    place=[r"(?i)reduc|hook|bucket|averag|node|rank|all parameters|every parameter"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward|own backward (is|goes) wrong",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)"
        r"|only the last micro.?batch",
        r"(?i)mean of (its|their) own (tokens|rows)|divi(ded|des) by (its|their) own (count"
        r"|tokens|rows)",
        r"(?i)(never|not) (been )?(all.?)?reduced|reduced twice|summed twice|counted twice",
        r"(?i)(other|wrong|same) (rows|labels|data)|read(s)? the same rows",
        r"(?i)only (the )?(embed|recurrent|norm|tags)\b",
    ],
)
WHY = (
    "Every rank's forward, backward and accumulation over its two micro-batches are right. The hook then takes the mean over the 3 ranks of node 0 and over the 2 ranks of node 1 and the mean of these two means: rank 0, 1, 2 count "
    "with 1/6 instead of 1/5 (factor 5/6), ranks 3 and 4 with 1/4 (factor 5/4). All parameters, all rows of the rank, both micro-batches alike: rows 0-7 come with 5/6, rows 8-12 with 5/4 of the right weight; all ranks end with the "
    "same wrong gradient. Loss scale 5 / 65 and rows are right; so are the groups and the broadcast. Fix: sum inside the node, sum between the leaders, divide once by the world size (or weight the node means by the number of their "
    "ranks)."
)
