"""An MLP-Mixer under DDP with a communication hook that copies each bucket into a staging tensor.
After FAULTS C12-08 / C13-07 (InfiniTrain PR 213, NERSC dl-tutorial PR 1: buffers written again before their
content is consumed): one staging tensor serves all buckets, and DDP reads a bucket's result after the last.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, PATCHES, WIDTH, CLASSES = 9, 5, 7, 4


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens = nn.Sequential(
            nn.Linear(PATCHES, 11), nn.GELU(), nn.Linear(11, PATCHES, bias=False)
        )
        self.channels = nn.Sequential(nn.Linear(WIDTH, 13), nn.GELU(), nn.Linear(13, WIDTH))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Mixer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.patch(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, PATCHES, 6, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["x"])

    def distribute(self, model, ctx):
        total = sum(p.numel() for p in model.parameters())
        self.staging = torch.empty(total, dtype=next(model.parameters()).dtype)
        # Buckets of about half a KiB; without unused parameters DDP would start with one bucket.
        model = DistributedDataParallel(model, bucket_cap_mb=0.0006, find_unused_parameters=True)
        model.register_comm_hook(ctx.world_size, self.hook)
        return model

    def stage(self, grads):
        return torch.empty_like(grads)

    def hook(self, ranks, bucket):
        grads = bucket.buffer()
        staged = self.stage(grads).copy_(grads)
        dist.all_reduce(staged)
        done = torch.futures.Future()
        done.set_result(staged.div_(ranks))
        return done

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss * ctx.world_size / len(batch["x"])).backward()


class Buggy(Clean):
    def stage(self, grads):
        return self.staging[: grads.numel()]


EXPECT = dict(
    right=[
        r"overwrit|re-?us|stale|clobber|buffer|bucket|staging|other param|another (param|tensor|bucket|layer)|wrong (param|place"
        r"|memory|content|tensor)|belongs? to|values? (of|from) (an)?other|copied (over|from)|swapp?ed|mixed up|shared (memory|storage)"
    ],
    place=[r"bucket", r"head|norm|blocks|channels|tokens", r"hook", r"buffer|staging", r"param"],
    wrong=[
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"(reduced|counted|divided) (twice|again)",
        r"patch\.\w+ (is|are|has|have) (a )?wrong",
        r"mean of (the )?means",
        r"forward (pass )?(is|was) wrong",
        r"ranks (disagree|hold different)",
    ],
)
WHY = (
    "The hook stages every bucket in the front of one tensor and returns that view; DDP copies results back when all buckets are "
    "done, so every bucket receives what the last bucket (the first layers: patch and the start of blocks.0) left, and behind it remains of "
    "longer earlier buckets. All ranks agree; only parameters of the last bucket are right, later layers hold other "
    "parameters' gradients."
)
