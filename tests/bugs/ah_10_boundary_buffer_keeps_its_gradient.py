"""A pipeline of three stages by hand, four micro-batches of two rows, each run forward and at once backward through all stages: a stage receives its input into one buffer that is allocated once and requires grad, and after its backward
sends the buffer's .grad to the stage before. At the end the gradients are summed over the stages (a stage has gradients of its own layers only), so that every rank holds all of them.

The bug: the buffer is a leaf and is kept for all micro-batches, so its .grad adds up from micro-batch to micro-batch, and what is sent back is the sum over all micro-batches so far. Compare pytorch issue #185331 (pipelines reuse
receive buffers and pass them to the stage itself, autograd state on the boundary activations stays).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, MICRO, FEATURES, WIDTH, CLASSES = 8, 2, 5, 7, 4


class Stage(nn.Module):
    def __init__(self, first, last):
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH) if first else None
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.leave = nn.Linear(WIDTH, CLASSES) if last else None

    def forward(self, x):
        if self.enter is not None:
            x = self.enter(x)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x if self.leave is None else self.leave(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(Stage(i == 0, i == 2) for i in range(3))

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x


class Clean:
    fresh = True

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
        return F.cross_entropy(model(rows["x"]), rows["label"], reduction="sum"), len(rows["x"])

    def step(self, model, batch, ctx):
        rank, last = ctx.rank, ctx.world_size - 1
        stage = model.stages[rank]
        kind = next(model.parameters())
        buffer = kind.new_zeros(MICRO, WIDTH).requires_grad_() if rank else None
        for low in range(0, ROWS, MICRO):
            rows = {k: v[low : low + MICRO] for k, v in batch.items()}
            if rank == 0:
                out = stage(rows["x"])
            else:
                dist.recv(buffer.data, rank - 1)
                if self.fresh:
                    buffer.grad = None
                out = stage(buffer)
            if rank == last:
                (F.cross_entropy(out, rows["label"], reduction="sum") / ROWS).backward()
            else:
                dist.send(out.detach().contiguous(), rank + 1)
                grad = torch.empty_like(out)
                dist.recv(grad, rank + 1)
                out.backward(grad)
            if rank:
                dist.send(buffer.grad.contiguous(), rank - 1)
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=ctx.group("pp"))


class Buggy(Clean):
    fresh = False


EXPECT = dict(
    right=[
        r"(?i)boundary|buffer|sent|sends|send|hand(s|ed)|transport|receiv|between (the )?stages|"
        r"stage|pipeline|stages\.[01]",
        r"(?i)gradient|backward|\.grad",
        r"(?i)accumulat|adds? up|sum|earlier|previous|so far|kept|stale|micro.?batch",
    ],
    place=[r"(?i)boundary|buffer|stages?[. ]?[01]|between (the )?stages|transport|send|sent"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)stages\.2(\.\w+)* .{0,20}(is|are|goes) wrong|leave .{0,12}(is|are) wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|(parameter|weight).{0,30}reduced (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|(pure|constant) factor",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read)",
        r"(?i)first micro.?batch .{0,25}(is|goes) wrong|micro.?batch 0 .{0,25}(is|goes) wrong|"
        r"all micro.?batches (are|go) wrong",
        r"(?i)(activation|input) .{0,25}(overwritten|of (another|the next))",
    ],
)
WHY = (
    "The forward, the activations sent on and the whole of stage 2 (rank 2) are right. Rank 2 sends back buffer.grad, which holds the input gradients of micro-batches 0 .. m summed place by place (row 0 with row 0, row 1 with row "
    "1), not that of m. Rank 1 runs the backward of micro-batch m with it: its gradients are wrong for m = 1, 2, 3 (micro-batch 0 is right), and its own buffer adds up these wrong gradients again, so rank 0 gets for m the sum over "
    "k <= m of what rank 1 made of the sum over j <= k. Wrong: all parameters of stages.0 and stages.1 (direction and size), on all ranks after the sum; stages.2 with leave is right. Divisor 8, the order of sends and the sum over "
    "the stages are right. Fix: buffer.grad = None (or a new tensor) for every micro-batch."
)
