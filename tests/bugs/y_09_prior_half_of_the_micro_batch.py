"""DreamBooth with prior preservation: a small denoiser, instance images with their prompt and class images with theirs in one batch, [instance 0..8, class 0..8]; loss = mean over the instance rows + 0.3 * mean over the class rows. HSDP (FSDP2, two replicas of two shards); the batch is
dealt out to the four ranks in runs of 5, 5, 4 and 4 rows, two micro-batches each.

The bug: `torch.chunk(pred, 2, dim=0)`, as in diffusers' train_dreambooth scripts, takes the first half of whatever lies before it for instances and the second for class images. That holds for the whole batch as the collate function builds it, and no longer after the batch has been cut over ranks and micro-batches (accelerate's
split_batches / dispatch_batches, accumulation). Kin: huggingface/diffusers PR #13441 (rows interleaved while chunk(2) assumes them grouped), d8ahazard/sd_dreambooth_extension issue #523.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
PAIRS, SIZE, WIDTH, PRIOR, MICRO = 9, 6, 8, 0.3, 2
ROWS = 2 * PAIRS


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, WIDTH)
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.condition = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, condition):
        return x + self.conv(F.silu(self.norm(x) + self.condition(condition)[..., None, None]))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.prompt = nn.Embedding(2, WIDTH)
        self.time = nn.Sequential(nn.Linear(3, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.first = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Conv2d(WIDTH, 3, 3, padding=1)

    def forward(self, noisy, t, prompt):
        waves = torch.stack([t, (3 * t).sin(), (3 * t).cos()], -1)
        condition = self.prompt(prompt) + self.time(waves)
        h = self.first(noisy)
        for block in self.blocks:
            h = block(h, condition)
        return self.last(F.silu(h))


def errors(model, rows):
    """The squared error of each row."""
    t = rows["t"][:, None, None, None]
    noisy = (1 - t).sqrt() * rows["image"] + t.sqrt() * rows["noise"]
    return (model(noisy, rows["t"], rows["prompt"]) - rows["noise"]).square().flatten(1).mean(1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Denoiser()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        prior = torch.arange(ROWS) >= PAIRS
        return {
            "image": torch.randn(ROWS, 3, SIZE, SIZE, generator=g)
            + 0.8 * prior[:, None, None, None],
            "noise": torch.randn(ROWS, 3, SIZE, SIZE, generator=g),
            "t": 0.05 + 0.9 * torch.rand(ROWS, generator=g),
            "prompt": prior.long(),
        }

    def terms(self):
        def of(kind, weight):
            return lambda model, rows: (
                weight * errors(model, rows)[rows["prompt"] == kind].sum(),
                (rows["prompt"] == kind).sum(),
            )

        return {"instance": of(0, 1.0), "prior": of(1, PRIOR)}

    def loss_sum(self, model, rows):
        error = errors(model, rows)
        return (error * torch.where(rows["prompt"] == 1, PRIOR, 1.0)).sum(), len(error) // 2

    def distribute(self, model, ctx):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def halves(self, error, rows):
        return error[rows["prompt"] == 0], error[rows["prompt"] == 1]

    def step(self, model, batch, ctx):
        mine = {
            k: v.tensor_split(ctx.world_size)[ctx.rank].tensor_split(MICRO)
            for k, v in batch.items()
        }
        for m in range(MICRO):
            rows = {k: v[m] for k, v in mine.items()}
            model.set_requires_gradient_sync(m == MICRO - 1)
            instance, prior = self.halves(errors(model, rows), rows)
            ((instance.sum() + PRIOR * prior.sum()) * ctx.world_size / PAIRS).backward()


class Buggy(Clean):
    def halves(self, error, rows):
        return error.chunk(2)


EXPECT = dict(
    right=[
        r"instance|prior|term|rows?",
        r"weight|factor|coefficient|scale|scaled|0\.3|3\.3|multipl|times|swapped|taken for|half|halves|chunk",
        r"rows?|micro.?batch|half|halves|chunk|second|first",
    ],
    place=[r"prior|instance|rows? \d|half|halves|chunk|micro.?batch"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"(reduced|summed|added) (twice|again)",
        r"each rank .{0,20}own (count|number|denominator)",
        r"micro.?batch\S* .{0,20}(lost|dropped|overwritten)",
        r"rows? .{0,20}(never read|read twice|lost)",
        r"forward of (the )?(model|blocks|denoiser).{0,20}wrong",
        r"all rows .{0,20}(same|one) (factor|weight)",
    ],
)
WHY = (
    "In each micro-batch the first half counts as instances (weight 1/9) and the second as class images (weight 0.3/9), whatever they are. Ranks 0-3 hold rows 0-4, 5-9, 10-13 and 14-17, micro-batches of 3+2, 3+2, 2+2 and 2+2 rows; rows 0-8 are instances, 9-17 class images. So the instance rows 2, 4, 7 get 0.3 where 1 is right, "
    "and the class rows 10, 12, 14, 16 get 1 where 0.3 is right (10/3 times too much); row 9 stands in a second half and row 8 in a first, both right by chance, as are the other rows. All parameters, all ranks alike after the reduction. Predictions, rows, the division by 9, the replicas' and shards' reductions and "
    "the accumulation are right. The fix is to choose by the rows' own kind (or to cut instance and class rows in parallel)."
)
