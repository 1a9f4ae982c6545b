"""A hand-written ZeRO-2: gradients lie in one flat buffer that is cut into one partition per rank; each gradient is reduced to the owner
of its partition, then the partitions are gathered. After DeepSpeed's stage-1/2 partitioning (parameters across partition borders,
"first_offset") and FAULTS C12-14 / C11-08: a parameter that lies in two partitions is reduced to the owner of its beginning alone.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, CHANNELS, WIDTH, TARGETS, MICRO_BATCHES = 13, 9, 3, 6, 2, 2


class Forecaster(nn.Module):
    """The next values of a series, from dilated convolutions."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(CHANNELS, WIDTH, 2)
        self.norms = nn.ModuleList(nn.GroupNorm(1, WIDTH) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=2**i) for i in range(2))
        self.out = nn.Linear(WIDTH, TARGETS)

    def forward(self, x):
        x = self.first(F.pad(x, (1, 0)))
        for i, (norm, conv) in enumerate(zip(self.norms, self.convs, strict=True)):
            x = x + F.glu(conv(F.pad(norm(x), (2**i, 0))), 1)
        return self.out(x.mT)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Forecaster()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        x = torch.randn(ROWS, CHANNELS, LENGTH, generator=g).cumsum(-1) / 2
        known = torch.rand(ROWS, LENGTH, generator=g) < 0.7
        return {"x": x, "y": x.mT[..., :TARGETS].roll(-1, 1).contiguous(), "known": known}

    def loss_sum(self, model, rows):
        each = F.huber_loss(model(rows["x"]), rows["y"], reduction="none").sum(-1)
        return (each * rows["known"]).sum(), rows["known"].sum()

    def reduce(self, flat, start, end, size):
        """Every stretch of a gradient to the rank that owns it."""
        while start < end:
            owner = start // size
            stop = min(end, (owner + 1) * size)
            self.reduce_to(flat[start:stop], owner)
            start = stop

    @staticmethod
    def reduce_to(part, owner):
        total = part.clone()
        dist.all_reduce(total)
        if dist.get_rank() == owner:
            part.copy_(total)

    def step(self, model, batch, ctx):
        params = list(reversed(list(model.parameters())))
        length = sum(p.numel() for p in params)
        size = -(-length // ctx.world_size)
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for i in range(MICRO_BATCHES):
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            (self.loss_sum(model, micro)[0] / batch["known"].sum()).backward()
        flat = F.pad(
            torch.cat([p.grad.flatten() for p in params]), (0, size * ctx.world_size - length)
        )
        start = 0
        for param in params:
            self.reduce(flat, start, start + param.numel(), size)
            start += param.numel()
        gathered = [torch.empty_like(flat[:size]) for _ in range(ctx.world_size)]
        dist.all_gather(gathered, flat[ctx.rank * size :][:size].contiguous())
        parts = torch.cat(gathered)[:length].split([p.numel() for p in params])
        for param, part in zip(params, parts, strict=True):
            param.grad.copy_(part.view_as(param))


class Buggy(Clean):
    def reduce(self, flat, start, end, size):
        self.reduce_to(flat[start:end], start // size)


EXPECT = dict(
    right=[
        r"convs\.[01]|partition|border|part of|stretch|element|slice|index",
        r"(not|never|n't|no|missing|without|lacks?|un|only|skip\w*)[ -]?.{0,60}(reduc|summed|synchroni|averag|combin|added|rows|rank)|"
        r"differ\w*|partial|own (rows|part)|rows|incomplete",
    ],
    place=[r"convs\.[01]\.weight", r"convs"],
    wrong=[
        r"(first|out|norms)\.\S* (is|are|has|have|was|were) (a )?(wrong|not reduced|missing)",
        r"(counted|reduced|summed) (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (wrong|different)",
        r"(all|every) parameters? (is|are) (wrong|not reduced)",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "convs.1.weight and convs.0.weight lie across the borders of the partitions. Each is summed for the owner of its first part only, "
    "so from element 105 of convs.1.weight on all ranks get rank 1's own gradient (rows 5-8), from element 80 of convs.0.weight on rank "
    "2's own (rows 9-12); everything else is right."
)
