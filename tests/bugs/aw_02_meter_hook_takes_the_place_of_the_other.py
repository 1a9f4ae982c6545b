"""Click model with two residual blocks, tensor parallel 2 x data parallel 2, built on accelerate's module hooks: the hook on `up` of a block copies the input to the tensor ranks (backward: the sum over them), the hook on `down` sums
the partial outputs (backward: identity). Two micro-batches. Slices of `up` and `down` are summed over tp, everything over dp.

The bug: to see how large its inputs get, somebody puts a meter on `up` of the second block with add_hook_to_module(module, hook). Without append=True it replaces the hook that is there, and the copy's backward sum is gone. The forward
does not change. After huggingface/accelerate PR 768, where a second hook erased the first and `append` was made.
"""

import torch
import torch.distributed as dist
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ITEMS, SLOTS, WIDTH, INNER, ROWS = 12, 3, 6, 8, 10
PARTS = [[(0, 3), (3, 5)], [(5, 6), (6, 10)]]


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class CopyInput(ModelHook):
    def __init__(self, group):
        self.group = group

    def pre_forward(self, module, x):
        return (Copy.apply(x, self.group),), {}


class SumOutput(ModelHook):
    def __init__(self, group):
        self.group = group

    def post_forward(self, module, output):
        return Sum.apply(output, self.group)


class Meter(ModelHook):
    def __init__(self):
        self.seen = []

    def pre_forward(self, module, x):
        self.seen.append(float(x.detach().abs().max()))
        return (x,), {}


class Up(nn.Linear):
    mine = slice(None)

    def forward(self, x):
        return F.linear(x, self.weight[self.mine], self.bias[self.mine])


class Down(nn.Linear):
    mine = slice(None)

    def forward(self, x):
        return F.linear(x, self.weight[:, self.mine])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = Up(WIDTH, INNER), Down(INNER, WIDTH, bias=False)
        self.shift = nn.Parameter(torch.randn(WIDTH) * 0.3)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x)))) + self.shift


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.click = nn.Linear(WIDTH, 1)

    def forward(self, items):
        x = self.items(items).sum(1)
        for block in self.blocks:
            x = block(x)
        return self.click(x)[:, 0]


class Clean:
    append = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "items": torch.randint(ITEMS, (ROWS, SLOTS), generator=g),
            "click": torch.randint(2, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        click = rows["click"]
        score = model(rows["items"])
        loss = F.binary_cross_entropy_with_logits(score, click.to(score.dtype), reduction="sum")
        return loss, len(click)

    def distribute(self, model, ctx):
        group = ctx.group("tp")
        size = INNER // dist.get_world_size(group)
        mine = slice(dist.get_rank(group) * size, (dist.get_rank(group) + 1) * size)
        for block in model.blocks:
            block.up.mine = block.down.mine = mine
            add_hook_to_module(block.up, CopyInput(group))
            add_hook_to_module(block.down, SumOutput(group))
        add_hook_to_module(model.blocks[1].up, Meter(), append=self.append)
        return model

    def step(self, model, batch, ctx):
        for low, high in PARTS[dist.get_rank(ctx.group("dp"))]:
            rows = {k: v[low:high] for k, v in batch.items()}
            (self.loss_sum(model, rows)[0] / ROWS).backward()
        for name, p in model.named_parameters():
            if ".up." in name or ".down." in name:
                dist.all_reduce(p.grad, group=ctx.group("tp"))
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    append = False


EXPECT = dict(
    right=[
        r"(?i)blocks?[ .\[]*1|second block|norm",
        r"(?i)backward|gradient",
        r"(?i)sum|reduc|partial|copy|hook|share|one (tensor )?rank|own|tp",
    ],
    place=[r"(?i)blocks?[ .\[]*1\]?(\.(up|norm))?|\bup\b|CopyInput|Copy\b"],
    wrong=[
        r"(?i)(?<!not )(?<!nor )forward (is wrong|goes wrong|of .{0,30} is wrong)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)blocks?[ .\[]*0\]?\.(up|down) .{0,60}(hook is missing|goes wrong first)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the (first"
        r"|last) micro.?batch",
        r"(?i)(reduced|summed|counted) (twice|again)",
        r"(?i)other rows|wrong rows|labels? .{0,20}wrong|over dp .{0,20}(missing|not)",
        r"(?i)click\.(weight|bias) (is|are) wrong",
    ],
)
WHY = (
    "blocks[1].up has lost its CopyInput hook on all ranks; the Meter stands in its place. In the backward the gradient of the input of blocks[1].up is that of the own slice of INNER only and is not summed over the two tp ranks. "
    "The forward, "
    "blocks[1].up, blocks[1].down, blocks[1].shift and click are right. blocks[1].norm (weight and bias), blocks[0] (all its parameters) and items are wrong: the residual path brings the full gradient, the path through "
    "blocks[1].up only one rank's share, "
    "so replicated parameters (norms, items, blocks[0].shift) differ between the tp ranks. Both micro-batches, all rows, both dp ranks. Divisor 10 and the reductions over tp and dp are right; the hook on blocks[0].up is still "
    "there. Fix: append=True."
)
