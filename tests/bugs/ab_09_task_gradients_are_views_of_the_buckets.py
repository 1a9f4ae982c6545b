"""Scene understanding with two tasks (depth of a pixel row and its segmentation) on a shared trunk under DDP with gradient_as_bucket_view=True and find_unused_parameters=True, three ranks, uneven rows. Each task has its own forward and
backward, so that the gradients can be looked at one by one; the step keeps them in a list and then writes their weighted sum into `.grad`.

The bug: the list keeps `p.grad` itself. With gradient_as_bucket_view each gradient is a view of DDP's bucket, and setting `.grad` to None between the tasks does not take the bucket away: the second backward writes into the same memory, and the
list of the first task then shows the gradients of the second. Without gradient_as_bucket_view the same code is right, which is how it was written. After reports on PCGrad / GradNorm implementations together with DDP's bucket views.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, PIXELS, CHANNELS, WIDTH, CLASSES = 10, 7, 3, 8, 5
WEIGHT = {"depth": 0.6, "segments": 1.7}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Conv1d(CHANNELS, WIDTH, 3, padding=1)
        self.trunk = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.heads = nn.ModuleDict(
            {"depth": nn.Conv1d(WIDTH, 1, 1), "segments": nn.Conv1d(WIDTH, CLASSES, 1)}
        )

    def forward(self, pixels, task):
        x = torch.tanh(self.enter(pixels))
        for layer in self.trunk:
            x = x + torch.tanh(layer(x))
        return self.heads[task](x)


class Clean:
    views = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "pixels": torch.randn(ROWS, CHANNELS, PIXELS, generator=g),
            "depth": torch.rand(ROWS, PIXELS, generator=g),
            "segments": torch.randint(CLASSES, (ROWS, PIXELS), generator=g),
        }

    @staticmethod
    def task_loss(model, rows, task):
        out = model(rows["pixels"], task)
        if task == "depth":
            return F.smooth_l1_loss(out.squeeze(1), rows[task], reduction="sum")
        return F.cross_entropy(out, rows[task], reduction="sum")

    def loss_sum(self, model, rows):
        loss = sum(w * self.task_loss(model, rows, task) for task, w in WEIGHT.items())
        return loss, rows["depth"].numel()

    def distribute(self, model, ctx):
        return DistributedDataParallel(
            model,
            process_group=ctx.group("dp"),
            gradient_as_bucket_view=True,
            find_unused_parameters=True,
        )

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        params, kept = list(model.parameters()), {}
        for task in WEIGHT:
            model.zero_grad(set_to_none=True)
            loss = self.task_loss(model, mine, task)
            (loss * ctx.world_size / batch["depth"].numel()).backward()
            grads = [p.grad for p in params]
            kept[task] = grads if self.views else [g if g is None else g.clone() for g in grads]
        for i, p in enumerate(params):
            parts = [w * kept[task][i] for task, w in WEIGHT.items() if kept[task][i] is not None]
            p.grad = sum(parts)


class Buggy(Clean):
    views = True


EXPECT = dict(
    right=[
        r"(?i)overwrit|same memory|storage|alias|view|bucket|buffer|depth|first (task|backward|term)|second (task|backward|term)|last (task|backward|term)|segments|lost|replaced",
        r"(?i)gradient|backward|term|contribution|task",
    ],
    place=[r"(?i)backward|kept|bucket|view|buffer|accumul|step|depth|term|task|\.grad|reduc"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)heads\.segments(\.(weight|bias))? (is|are) wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|ranks? (disagree|differ)",
        r"(?i)divi(ded|des) by (its|their) own|factor of (1/)?3\b|mean of means",
        r"(?i)rows? .{0,20}(never read|read twice|dropped)|is detached",
    ],
)
WHY = (
    "The gradients kept for depth are views of DDP's buckets; the backward for segments writes into the same buckets, so both lists show the segments gradients when the weighted sum is taken. enter and trunk get (0.6 + 1.7) times the "
    "gradient of the segments loss in place of 0.6 times that of depth plus 1.7 times that of segments: the depth loss is lost, and segments weighs 2.3 / 1.7 too much. heads.depth, not used in the second backward, gets zero (its part of the "
    "bucket is cleared and reduced as zeros); heads.segments has no gradient in the first pass (None) and is right. The same on all three ranks. Forward of both tasks, losses, divisors, DDP's reductions one by one and the rows are right. "
    "Fix: clone the gradients before the next backward (or gradient_as_bucket_view=False)."
)
