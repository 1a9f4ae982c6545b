"""A channels-last convolutional net under data parallelism with an all-reduce helper.
After FAULTS C08-01 (Megatron-LM issue 5337): the helper reduces a contiguous temporary copy."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, SIZE, CLASSES = 11, 7, 5


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.GroupNorm(2, width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 1)

    def forward(self, x):
        return x + self.conv2(F.silu(self.conv1(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2)
        self.blocks = nn.ModuleList(Residual(6) for _ in range(2))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "images": torch.randn(ROWS, 3, SIZE, SIZE, generator=g),
            "labels": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        loss = F.cross_entropy(model(rows["images"]), rows["labels"], reduction="sum")
        return loss, len(rows["labels"])

    def distribute(self, model, ctx):
        return model.to(memory_format=torch.channels_last)

    def reduced(self, grad, group):
        """The sum over the group; the collective wants dense memory."""
        grad = grad.contiguous()
        dist.all_reduce(grad, group=group)
        return grad

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        mine["images"] = mine["images"].to(memory_format=torch.channels_last)
        loss, _ = self.loss_sum(model, mine)
        (loss / ROWS).backward()
        for param in model.parameters():
            param.grad = self.reduced(param.grad, ctx.group("dp"))


class Buggy(Clean):
    def reduced(self, grad, group):
        dist.all_reduce(grad.contiguous(), group=group)
        return grad


EXPECT = dict(
    right=[
        r"stem|conv1",
        (
            r"(not|never|un|isn't|aren't|without being) ?-?((all-?)?reduced|summed|added)|missing|own (part|share|rows|"
            r"gradient|contribution)|partial|lacks?|only (its|the rank|this rank|the local|local|own)|"
            r"(local|own) (part|gradient|rows)|lost|no (all.?)?reduc|left out|differ\w* (between|on|across)"
        ),
    ],
    place=[r"stem", r"conv1"],
    wrong=[
        r"(reduced|counted|divided) (twice|again)",
        r"every parameter (is|was) (not|never)",
        r"(head|norm|bias)\S* (is|are|was) (not|never) reduced",
        r"mean of (the )?means",
        r"forward (is|was) wrong",
    ],
)
WHY = (
    "Gradients of the 3x3 convolution weights (stem, conv1 of each block) are channels-last, hence not contiguous: the sum goes "
    "into a temporary copy and each rank keeps its own part; biases, norms, 1x1 and the head are right."
)
