"""LoRA on both linears of a tensor-parallel MLP, the up adapter with its rank cut over the tensor ranks. After "fully sharded LoRA" in
vLLM / S-LoRA and NeMo's and Megatron-Bridge's parallel adapters (scale alpha / dim), FAULTS C19 M59 (a local size in a formula): the
scale is taken from the shape of A.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, INPUTS, WIDTH, INNER, RANK, ALPHA, CLASSES = 11, 6, 8, 10, 4, 6.0, 3


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Gather(torch.autograd.Function):
    """Columns of all ranks, used by each rank for its own outputs."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.size = group, x.shape[1]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[:, dist.get_rank(ctx.group) * ctx.size :][:, : ctx.size], None


class Adapter(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.a = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5)
        self.b = nn.Parameter(0.5 * torch.randn(outputs, RANK))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(INPUTS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)
        self.up_adapter, self.down_adapter = Adapter(WIDTH, INNER), Adapter(INNER, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        for module in (self.enter, self.up, self.down):
            module.requires_grad_(False)

    def forward(self, x, scales, copy=lambda x: x, total=lambda x: x, gather=lambda x: x):
        x = torch.tanh(self.enter(x))
        inner, one, two = copy(x), self.up_adapter, self.down_adapter
        inner = F.gelu(self.up(inner) + scales["up"] * gather(inner @ one.a.mT) @ one.b.mT)
        low = total(inner @ two.a.mT)
        return self.head(x + total(self.down(inner)) + scales["down"] * low @ two.b.mT)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["x"], {"up": ALPHA / RANK, "down": ALPHA / RANK})
        return F.cross_entropy(logits, rows["y"], reduction="sum"), len(rows["y"])

    def distribute(self, model, ctx):
        def keep(module, name, dim):
            old = getattr(module, name)
            new = old.detach().chunk(ctx.axes["tp"], dim)[ctx.coords["tp"]].clone()
            setattr(module, name, nn.Parameter(new, requires_grad=old.requires_grad))

        for module, name, dim in (
            (model.up, "weight", 0),
            (model.up, "bias", 0),
            (model.down, "weight", 1),
            (model.up_adapter, "a", 0),
            (model.up_adapter, "b", 0),
            (model.down_adapter, "a", 1),
        ):
            keep(module, name, dim)
        return model

    def scale(self, adapter):
        return ALPHA / RANK

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        group = ctx.group("tp")
        logits = model(
            mine["x"],
            {"up": self.scale(model.up_adapter), "down": self.scale(model.down_adapter)},
            total=lambda x: Sum.apply(x, group),
            copy=lambda x: Copy.apply(x, group),
            gather=lambda x: Gather.apply(x, group),
        )
        (F.cross_entropy(logits, mine["y"], reduction="sum") / ROWS).backward()
        for param in model.parameters():
            if param.requires_grad:
                dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def scale(self, adapter):
        return ALPHA / adapter.a.shape[0]


EXPECT = dict(
    right=[
        r"forward|output|activation|values? (of|at|in)|input",
        r"up_adapter|\bup\b|adapter|head|lora|whole model|net|scale",
    ],
    place=[r"adapter", r"\bup\b", r"(all|every|each) ranks?|ranks? \W?[0-3]", r"forward|output"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (right|exact|correct)",
        r"first wrong .{0,20}enter",
        r"loss .{0,20}(divided|normali[sz]ed) by (its|the|their) own",
    ],
)
WHY = (
    "A of the up adapter holds two of its four rows on each tensor rank, so the adapter's scale is 6/2 instead of 6/4: its output is "
    "twice what it should be, on all ranks, and the forward is wrong from there on. The gradients of both adapters and of the head "
    "are wrong; the down adapter's own scale (its rank is not cut) and all reductions are right."
)
