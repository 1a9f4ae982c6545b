"""ZeRO-1 with flat buffers: every step starts with an all-gather of the updated weights.
After FAULTS C12-07 (Megatron-LM PR 4609): the gradient buffer doubles as the receive buffer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH = 8, 4, 11, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 19), nn.GELU(), nn.Linear(19, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.decoder = nn.ModuleList(Block() for _ in range(2))
        self.output_layer = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.decoder:
            x = block(x)
        return self.output_layer(x)


class Bucket:
    """Weights and gradients of some parameters, one flat buffer each, padded to the ranks."""

    def __init__(self, params, ranks, layerwise):
        self.params, self.layerwise = params, layerwise
        size = sum(p.numel() for p in params)
        size += -size % ranks
        self.param_data = params[0].new_zeros(size).detach()
        self.grad_data = torch.zeros_like(self.param_data)
        start = 0
        for p in params:
            at = slice(start, start + p.numel())
            self.param_data[at].copy_(p.detach().flatten())
            p.data = self.param_data[at].view_as(p)
            p.main_grad = self.grad_data[at].view_as(p)
            start = at.stop

    def zero_grad(self):
        self.grad_data.zero_()

    def gather_params(self, rank, ranks, group, zero_after_copy):
        """Every rank sends the slice that its optimizer has updated."""
        mine = self.param_data.chunk(ranks)[rank].clone()
        if self.layerwise:
            dist.all_gather(list(self.grad_data.chunk(ranks)), mine, group=group)
            self.param_data.copy_(self.grad_data)
            if zero_after_copy:
                self.grad_data.zero_()
        else:
            dist.all_gather(list(self.param_data.chunk(ranks)), mine, group=group)


class Clean:
    zero_after_copy = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        return {"tokens": ids[:, :-1], "labels": ids[:, 1:]}

    def loss_sum(self, model, rows):
        logits, labels = model(rows["tokens"]).flatten(0, 1), rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()

    def distribute(self, model, ctx):
        ranks = ctx.axes["dp"]
        ends = [*model.embedding.parameters(), *model.output_layer.parameters()]
        model.buckets = [
            Bucket(ends, ranks, layerwise=False),
            Bucket(list(model.decoder[1].parameters()), ranks, layerwise=True),
            Bucket(list(model.decoder[0].parameters()), ranks, layerwise=True),
        ]

        def accumulate(param):
            param.main_grad.add_(param.grad)
            param.grad = None

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(accumulate)
        return model

    def gradient_of(self, name, param, ctx):
        return param.main_grad

    def step(self, model, batch, ctx):
        rank, ranks, group = ctx.coords["dp"], ctx.axes["dp"], ctx.group("dp")
        for bucket in model.buckets:
            bucket.zero_grad()
        for bucket in model.buckets:
            bucket.gather_params(rank, ranks, group, self.zero_after_copy)
        mine = {k: v.tensor_split(ranks)[rank] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / batch["labels"].numel()).backward()
        for bucket in model.buckets:
            dist.all_reduce(bucket.grad_data, group=group)


class Buggy(Clean):
    zero_after_copy = False


EXPECT = dict(
    right=[
        r"decoder",
        (
            r"stale|left ?over|not (zeroed|cleared|reset)|never (zeroed|cleared|reset)|carried|already (holds?|in|there)"
            r"|start(s|ed|ing)? (from|with|at)|(added|adds|plus|extra|offset|surplus|on top|contains?|includes?|sum)"
            r".{0,80}(weight|param|value|constant|term|something|part|buffer)"
            r"|(weights?|parameters?|values?) .{0,60}(in|added|added to|inside|on top).{0,40}(grad|buffer)"
            r"|times (the|its) (own )?(weight|param|value)|not (a )?(combination|sum|made) of|"
            r"(no|not any|none of the) (rows?|combination|weights? of rows)|foreign"
        ),
    ],
    place=[r"decoder\.[01]", r"decoder"],
    wrong=[
        r"(not|never) (all-)?reduced|missing (all.?)?reduc",
        r"(reduced|divided) (twice|again)",
        r"mean of (the )?means",
        r"(embedding|output_layer)\S* (is|are) (wrong|stale)",
        r"rows? (is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "The decoder blocks' gradient buffers receive the gathered weights and are not zeroed before the "
    "backward accumulates into them, so after the sum over dp each gradient has 3 times the weight itself "
    "added; embedding and output layer, gathered in place, are right."
)
