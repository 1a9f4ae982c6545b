"""A point-cloud network under HSDP (FSDP2 on a two-dimensional mesh). After FAULTS C17-07 and C12-12 (RLinf PR 1558, PyTorch PR
125484): one module is wrapped with the one-dimensional shard mesh, so its gradients never cross the replicate axis.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"replicate": 2, "shard": 3}}}}
ROWS, POINTS, WIDTH, CLASSES = 17, 7, 10, 5


class Layer(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.each, self.pooled = nn.Linear(inputs, WIDTH), nn.Linear(inputs, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, mask):
        mean = (x * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        return F.relu(self.norm(self.each(x) + self.pooled(mean)))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.out(F.gelu(self.hidden(x)))


class Cloud(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(3), Layer(WIDTH)])
        self.scale = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = Head()

    def forward(self, x, mask):
        for layer in self.layers:
            x = layer(x, mask)
        x = self.scale(x).masked_fill(~mask[..., None], -1e4).amax(1)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Cloud()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        points = torch.randint(2, POINTS + 1, (ROWS, 1), generator=g)
        return {
            "x": torch.randn(ROWS, POINTS, 3, generator=g),
            "mask": torch.arange(POINTS) < points,
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["x"], rows["mask"])
        return F.cross_entropy(logits, rows["y"], reduction="sum"), len(rows["y"])

    def head_mesh(self, ctx):
        return ctx.mesh

    def distribute(self, model, ctx):
        for part in (*model.layers, model.head, model):
            fully_shard(part, mesh=self.head_mesh(ctx) if part is model.head else ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, count = self.loss_sum(model, mine)
        count = torch.tensor(count)
        dist.all_reduce(count)
        (loss / count).backward()


class Buggy(Clean):
    def head_mesh(self, ctx):
        return ctx.mesh["shard"]


EXPECT = dict(
    right=[
        r"head",
        r"replica\w*",
        r"(not|never|n't|no|missing|without|lacks?|un|only|skip\w*)[ -]?.{0,50}(reduc|summed|synchroni|averag|combin|added|shard|rows|cross)|"
        r"differ\w*|partial|own (rows|part|replica)|half",
    ],
    place=[r"head", r"replica\w*"],
    wrong=[
        r"layers\.\S+ (is|are|has|have) (a )?wrong",
        r"(reduced|counted|summed) (twice|again)",
        r"mean of (the )?means",
        r"forward (pass )?(is|was) wrong",
        r"(all|every) parameters? (is|are) (wrong|not reduced)",
    ],
)
WHY = (
    "head.* is wrapped with the shard mesh alone, so its gradients are reduce-scattered over the 3 shard ranks but never summed over "
    "the 2 replicas: ranks 0-2 hold the gradient of their rows only, ranks 3-5 that of theirs. Everything else is right."
)
