"""A reward model (pointwise, masked mean over tokens) with FSDP2 on three ranks and three micro-batches per rank; gradients are reduced with the last one (`set_requires_gradient_sync`). Lengths vary, so each step starts with a pre-flight: forward and backward of the rank's longest micro-batch, whose gradients
are thrown away; if it had run out of memory all ranks would agree to cut finer (left out here).

The bug: the pre-flight runs with `set_requires_gradient_sync(False)` to save the reduce-scatter of gradients that nobody wants, and is followed by `model.zero_grad()`. zero_grad sees the sharded parameters only. After "grad leak" reports (DeepSpeed's BF16_Optimizer last-micro-batch leak, FSDP no_sync and zero_grad discussions).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
WORDS, LENGTH, WIDTH, INNER, ROWS, MICRO = 23, 8, 10, 14, 13, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Conv1d(WIDTH, WIDTH, 3)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        y = self.mix(F.pad(self.norm(x).mT, (2, 0))).mT
        return x + self.down(F.silu(self.up(y)))


class Reward(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.score = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, ids, length):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        valid = (torch.arange(ids.shape[1]) < length[:, None])[..., None]
        return self.score((self.norm(x) * valid).sum(1) / length[:, None]).squeeze(-1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Reward()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
            "length": torch.randint(2, LENGTH + 1, (ROWS,), generator=g),
            "stars": torch.randn(ROWS, generator=g) * 2,
        }

    def loss_sum(self, model, rows):
        longest = int(rows["length"].max())
        score = model(rows["ids"][:, :longest], rows["length"])
        return F.smooth_l1_loss(score, rows["stars"], reduction="sum"), len(rows["stars"])

    def distribute(self, model, ctx):
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def loss(self, model, rows):
        return self.loss_sum(model, rows)[0] / ROWS

    def fits(self, model, rows):
        """Does the largest piece fit? Its gradients are not used."""
        model.set_requires_gradient_sync(True)
        self.loss(model, rows).backward()
        model.zero_grad()
        return True

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        parts = [{k: v.tensor_split(MICRO)[m] for k, v in mine.items()} for m in range(MICRO)]
        fine = self.fits(model, max(parts, key=lambda p: int(p["length"].sum())))
        fine = torch.tensor(fine, dtype=torch.int64)
        dist.all_reduce(fine, dist.ReduceOp.MIN, group=ctx.group("dp"))
        assert fine
        for m, rows in enumerate(parts):
            model.set_requires_gradient_sync(m == MICRO - 1)
            self.loss(model, rows).backward()


class Buggy(Clean):
    def fits(self, model, rows):
        model.set_requires_gradient_sync(False)
        self.loss(model, rows).backward()
        model.zero_grad()
        return True


EXPECT = dict(
    right=[
        r"(?i)micro.?batch|rows?\b|pre.?flight|piece|longest|leftover|stale",
        r"(?i)twice|two times|double|again|\b2(\.0+)?\b|leftover|left over|stale|leak|extra|additional|more than once|not (cleared|zeroed|thrown|discarded)|too (much|often|heavy)",
    ],
    place=[r"(?i)micro.?batch|rows?\b|pre.?flight|fits|accumulat|unsharded|zero_grad"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|missing reduce|reduced (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their) own|mean of means",
        r"(?i)(rows?|micro.?batch\S*) .{0,20}(never read|dropped|lost|missing)",
        r"(?i)all (rows|gradients) .{0,20}(twice|doubled)|factor of 2 on (all|every)",
        r"(?i)backward of \S+ is wrong|wrong adjoint",
    ],
)
WHY = (
    "With gradient sync off, FSDP2 leaves the pre-flight's gradients in the UNSHARDED parameters; model.zero_grad() clears the sharded ones' .grad only. The next backward adds to them, and the reduce-scatter of the last micro-batch takes them along. So on every rank the rows of the micro-batch with the most tokens are counted twice (weight 2/13 instead of 1/13), "
    "all other rows once. With seeds 0 and 5 that is micro-batch 0 on every rank: rows 0, 1 on rank 0, rows 5, 6 on rank 1, rows 9, 10 on rank 2 (of 0-4, 5-8, 9-12); <d, r> / <r, r> is 1.32 to 1.53 with seed 0. All parameters are wrong in direction on all ranks (every shard), all in the same way. Forward, divisor 13, the reduction (sum) itself and the other micro-batches are right. Fix: leave the sync on in the pre-flight, or use torch.autograd.grad / drop the unsharded gradients."
)
