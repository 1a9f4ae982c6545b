"""Two-dimensional tensor parallelism (rows of the batch over one axis, features over the other, weight blocks over both). After
ColossalAI's 2D layers (LayerNorm and bias gradients over the other axis) and FAULTS C05-01: what is reduced over the row axis is
chosen by name, and the norm weights are not among it.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"row": 2, "col": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH, HIDDEN = 7, 5, 12, 6, 12


class Gathered(torch.autograd.Function):
    """Parts of the ranks of a group side by side; back, the own part, summed over the group or (users are equal) not."""

    @staticmethod
    def forward(ctx, x, dim, group, summed):
        ctx.dim, ctx.group, ctx.summed = dim, group, summed
        parts = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=dim)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        if ctx.summed:
            dist.all_reduce(grad, group=ctx.group)
        return (
            grad.chunk(dist.get_world_size(ctx.group), dim=ctx.dim)[dist.get_rank(ctx.group)],
            None,
            None,
            None,
        )


class Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(1 + 0.2 * torch.randn(WIDTH)),
            nn.Parameter(0.1 * torch.randn(WIDTH)),
        )

    def forward(self, x, net):
        x = x - net.total(x.sum(-1, keepdim=True)) / WIDTH
        variance = net.total(x.square().sum(-1, keepdim=True)) / WIDTH
        return x * (variance + 1e-5).rsqrt() * net.local(self.weight) + net.local(self.bias)


class Linear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(0.1 * torch.randn(outputs))

    def forward(self, x, net):
        return net.features(x) @ net.block(self.weight) + net.local(self.bias)


class Plain:
    """One process: nothing is cut."""

    @staticmethod
    def same(x):
        return x

    total = features = block = local = same


class Cut:
    def __init__(self, ctx):
        self.row, self.col = ctx.group("row"), ctx.group("col")

    def total(self, x):
        return Total.apply(x, self.col)

    def features(self, x):
        return Gathered.apply(x, -1, self.col, True)

    def block(self, weight):
        return Gathered.apply(weight.to_local(), 0, self.row, True)

    def local(self, vector):
        return vector.to_local()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Parameter(torch.randn(VOCAB, WIDTH))
        self.norms = nn.ModuleList(Norm() for _ in range(3))
        self.past = nn.ModuleList(Linear(WIDTH, WIDTH) for _ in range(2))
        self.up = nn.ModuleList(Linear(WIDTH, HIDDEN) for _ in range(2))
        self.down = nn.ModuleList(Linear(HIDDEN, WIDTH) for _ in range(2))
        self.head = Linear(WIDTH, VOCAB)

    def forward(self, tokens, net=Plain):
        x = net.local(self.embed)[tokens]
        for norm, past, up, down in zip(self.norms, self.past, self.up, self.down):
            h = norm(x, net)
            h = h + past(h.cumsum(1) / torch.arange(1, LENGTH + 1)[:, None], net)
            x = x + down(F.gelu(up(h, net)), net)
        return self.head(self.norms[2](x, net), net)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        padding = torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].masked_fill(padding, -100)}

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.token_loss(model(rows["tokens"]), rows["labels"]), (
            rows["labels"] != -100
        ).sum()

    def distribute(self, model, ctx):
        for module in list(model.modules()):
            for name, param in list(module.named_parameters(recurse=False)):
                vector = [Replicate(), Shard(param.dim() - 1)]
                cut = (
                    [Shard(0), Shard(1)]
                    if isinstance(module, Linear) and name == "weight"
                    else vector
                )
                setattr(module, name, nn.Parameter(distribute_tensor(param.data, ctx.mesh, cut)))
        return model

    def over_rows(self, name, param):
        return param.placements[0].is_replicate()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["row"])[ctx.coords["row"]] for k, v in batch.items()}
        logits = Gathered.apply(model(mine["tokens"], Cut(ctx)), -1, ctx.group("col"), False)
        (self.token_loss(logits, mine["labels"]) / (batch["labels"] != -100).sum()).backward()
        for name, param in model.named_parameters():
            if self.over_rows(name, param):
                dist.all_reduce(param.grad.to_local(), group=ctx.group("row"))


class Buggy(Clean):
    def over_rows(self, name, param):
        return name.endswith("bias") or name == "embed"


EXPECT = dict(
    right=[
        r"norms?",
        r"(not|never|n't|no|missing|without|lacks?|un|only|skip\w*)[ -]?.{0,60}(reduc|summed|synchroni|combin|added|"
        r"rows|rank|\brow\b)|partial|differ|own (rows|part)",
    ],
    place=[r"norms", r"\brow\b"],
    wrong=[
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"(past|up|down|head|embed)\S* (is|are|was|were) (wrong|missing|(not|never) (reduced|summed))",
        r"norms\.\d\.bias (is|are|was|were) (wrong|missing|(not|never) (reduced|summed))",
        r"(not|never) (reduced|summed) over (the )?.?col\b|missing .{0,20}over .?col\b",
    ],
)
WHY = (
    "norms.0, norms.1 and norms.2.weight are replicated over the row axis, whose ranks hold different rows of the batch, and their "
    "gradients are not summed over it: ranks 0-2 have those of the first four rows, ranks 3-5 of the last three. All other "
    "parameters (norm biases too) are right, and so is the forward."
)
