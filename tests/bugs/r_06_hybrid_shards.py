"""HSDP (fully_shard over two replicas of two shards) with the small gates of each block kept out of the shards by `ignored_params` and reduced
by hand after the last of two micro-batches; unlike rows on the ranks. After reports on ignored parameters under hybrid sharding.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"replica": 2, "shard": 2}}}}
ROWS, LENGTH, WIDTH, VOCAB, MICRO = 11, 5, 10, 14, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.over = nn.LayerNorm(WIDTH), nn.Linear(LENGTH, LENGTH)
        self.up, self.down = nn.Linear(WIDTH, 19), nn.Linear(19, WIDTH)
        self.gate = nn.Parameter(0.5 + torch.rand(2, WIDTH))

    def forward(self, x):
        x = x + self.gate[0] * self.over(x.transpose(1, 2)).transpose(1, 2)
        return x + self.gate[1] * self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Clean:
    axes = "replica", "shard"

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {k: torch.randint(VOCAB, (ROWS, LENGTH), generator=g) for k in ("tokens", "labels")}

    def loss_sum(self, model, rows):
        return token_loss(model(rows["tokens"]), rows["labels"]), rows["labels"].numel()

    def distribute(self, model, ctx):
        gates = {block.gate for block in model.blocks}
        for block in model.blocks:
            fully_shard(block, mesh=ctx.mesh, ignored_params={block.gate})
        return fully_shard(model, mesh=ctx.mesh, ignored_params=gates)

    def step(self, model, batch, ctx):
        world = ctx.axes["replica"] * ctx.axes["shard"]
        me = ctx.coords["replica"] * ctx.axes["shard"] + ctx.coords["shard"]
        mine = {k: v.tensor_split(world)[me].tensor_split(MICRO) for k, v in batch.items()}
        for i in range(MICRO):
            model.set_requires_gradient_sync(i == MICRO - 1)
            loss = token_loss(model(mine["tokens"][i]), mine["labels"][i])
            (loss * world / batch["labels"].numel()).backward()  # FSDP averages
        group = ctx.group(*self.axes)
        for block in model.blocks:
            dist.all_reduce(block.gate.grad, group=group)
            block.gate.grad /= dist.get_world_size(group)


class Buggy(Clean):
    axes = ("shard",)


EXPECT = dict(
    right=[
        r"gate",
        r"replica|too few|over (the )?(axis |group )?shard|2 of (the )?4|ranks? \[?\(?0, ?1|ranks? 0 (and|\+) 1|group",
    ],
    place=[r"gate"],
    wrong=[
        r"forward (is|goes|was) wrong|goes wrong in the forward",
        r"(up|down|over|norm|head|embed)\.(weight|bias)\S* (is|are) wrong",
        r"(never|not) (been )?(all.?)?reduced at all|is (never|not) reduced",
        r"do(es)? not read every row once|rows? .{0,20}(never|twice) read",
        r"backward of \S*(blocks|block)\S* is wrong",
    ],
)
WHY = (
    "The gates are plain parameters that FSDP leaves alone; by hand they are averaged over the axis `shard` only, not over `replica`. Ranks 0 and 1 end "
    "with twice the sum of their own rows (4 / 2), ranks 2 and 3 with twice that of theirs; the replicas differ. Only the three gates are wrong; "
    "all that FSDP shards, every forward and every backward are right."
)
