"""Megatron-like tensor parallelism with sequence parallelism: replicated weights that see a
stretch carry a flag. After FAULTS C05-01 (Megatron-LM issue 1446).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}

ROWS, LENGTH, VOCABULARY, WIDTH, HIDDEN = 4, 6, 13, 8, 12
LAYERNORMS = ("input_layernorm", "final_layernorm")


class GatherSequence(torch.autograd.Function):
    """All-gather along the sequence forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return grad.chunk(size, dim=1)[rank].contiguous(), None


class ScatterSequence(torch.autograd.Function):
    """Reduce-scatter along the sequence forward, all-gather backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=group)
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        return out.chunk(size, dim=1)[rank].contiguous()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts, dim=1), None


def cut(param, dim, ctx):
    """This rank's part of a weight."""
    return nn.Parameter(param.detach().chunk(ctx.axes["tp"], dim)[ctx.coords["tp"]].clone())


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.fc2_bias = nn.Parameter(torch.randn(WIDTH) / 10)
        self.group = None

    def forward(self, x):
        h = self.input_layernorm(x)
        if self.group is not None:
            h = GatherSequence.apply(h, self.group)
        h = self.fc2(F.gelu(self.fc1(h)))
        if self.group is not None:
            h = ScatterSequence.apply(h, self.group)
        return x + h + self.fc2_bias


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.final_layernorm = nn.LayerNorm(WIDTH)
        self.output_layer = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output_layer(self.final_layernorm(x))


class Clean:
    layernorms = LAYERNORMS

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=g)
        padding = torch.arange(LENGTH) >= lengths
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(padding, -100)}

    def loss_sum(self, model, rows):
        labels = rows["labels"]
        logits = model(rows["ids"]).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()

    def distribute(self, model, ctx):
        for layer in model.layers:
            layer.group = ctx.group("tp")
            layer.fc1.weight = cut(layer.fc1.weight, 0, ctx)
            layer.fc1.bias = cut(layer.fc1.bias, 0, ctx)
            layer.fc2.weight = cut(layer.fc2.weight, 1, ctx)
        marked = (*self.layernorms, "embedding", "output_layer", "fc2_bias")
        for name, param in model.named_parameters():
            param.sequence_parallel = any(part in marked for part in name.split("."))
        return model

    def step(self, model, batch, ctx):
        tp, size = ctx.coords["tp"], ctx.axes["tp"]
        mine = {k: v.chunk(size, dim=1)[tp] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / (batch["labels"] != -100).sum()).backward()
        for param in model.parameters():
            if param.sequence_parallel:
                dist.all_reduce(param.grad, group=ctx.group("tp"))


class Buggy(Clean):
    layernorms = LAYERNORMS[:1]  # those of the layers


EXPECT = dict(
    right=[
        (
            r"not reduced|never reduced|not summed|never summed|missing.{0,40}(reduc|sum)"
            r"|unreduced|without (a |the |any )?(reduc|all.?reduce|sum)|own (part|share|rows"
            r"|contribution)|partial|no (reduc|all.?reduce|collective)|lacks? .{0,60}(rank"
            r"|part|sum|reduc)|only (its|their|the) own|(reduction|all.?reduce"
            r"|sum).{0,40}(missing|left out|skipped|absent)|stays? local|local to (each|its)"
            r"|out of the reduc"
        ),
        r"final_layernorm",
    ],
    place=[r"final_layernorm"],
    wrong=[
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
        r"averag",
        r"input_layernorm.{0,40}(not|never) reduced",
    ],
)

WHY = (
    "The final_layernorm has no sequence_parallel flag, so each tp rank keeps the partial "
    "gradient of its own stretch."
)
