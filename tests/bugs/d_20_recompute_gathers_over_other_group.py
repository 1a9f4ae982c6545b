"""Recomputation from inputs that each tp rank keeps a part of, beside data parallelism. After FAULTS
C15-08 (Megatron-LM issue 7452, finding 4): the parts are gathered with another process group.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}

ROWS, LENGTH, WIDTH, HIDDEN, VOCABULARY = 8, 4, 10, 14, 13


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


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class DistributedCheckpoint(torch.autograd.Function):
    """Keeps this rank's part of the input's last dimension; the backward gathers and runs again."""

    @staticmethod
    def forward(ctx, x, run, split, gather):
        ctx.run, ctx.gather = run, gather
        size, rank = dist.get_world_size(split), dist.get_rank(split)
        ctx.save_for_backward(x.chunk(size, dim=-1)[rank].clone())
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, grad):
        (part,) = ctx.saved_tensors
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(ctx.gather))]
        dist.all_gather(parts, part, group=ctx.gather)
        x = torch.cat(parts, dim=-1).requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x)
        torch.autograd.backward(out, grad)
        return x.grad, None, None, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 2, groups=5)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x, tp=None):
        y = F.pad(self.norm1(x).transpose(1, 2), (1, 0))
        x = x + self.mix(y).transpose(1, 2)
        y = self.norm2(x)
        if tp is None:
            return x + self.down(F.gelu(self.up(y)))
        return x + Reduce.apply(self.down(F.gelu(self.up(Copy.apply(y, tp)))), tp)


class Model(nn.Module):
    """Two layers, and a further one (multi-token prediction in the report) that is recomputed."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.further = Layer()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, tp=None, recompute=None):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, tp)
        if recompute is None:
            x = self.further(x, tp)
        else:
            x = recompute(lambda x: self.further(x, tp), x)
        return self.head(self.norm(x))


class Clean:
    gather_axis = "tp"

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows, **parallel):
        logits, labels = model(rows["ids"], **parallel).flatten(0, 1), rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()

    @staticmethod
    def cut(name):
        return {"up": 0, "down": 1}.get(name.split(".")[-2])

    def shard_of(self, name, ctx):
        dim = self.cut(name)
        if dim is None:
            return None
        n = HIDDEN // ctx.axes["tp"]
        at = slice(n * ctx.coords["tp"], n * (ctx.coords["tp"] + 1))
        return (slice(None),) * dim + (at,)

    def distribute(self, model, ctx):
        for name, param in model.named_parameters():
            if self.cut(name) is not None:
                param.data = param.data[self.shard_of(name, ctx)].clone()
        return model

    def step(self, model, batch, ctx):
        tp, gather = ctx.group("tp"), ctx.group(self.gather_axis)

        def recompute(run, x):
            return DistributedCheckpoint.apply(x, run, tp, gather)

        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine, tp=tp, recompute=recompute)
        (loss / (ROWS * LENGTH)).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    gather_axis = "dp"


EXPECT = dict(
    right=[
        r"further",
        r"backward|recomput|checkpoint|second forward|run again|gather|group|saved|input|other (ranks|rows|data)"
        r"|activation",
    ],
    place=[r"further", r"all.?gather", r"\bdp\b.*\btp\b|\btp\b.*\bdp\b|group"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|two times|2 times)|reduced (twice|again)",
        r"averag|mean of (the )?means",
        r"forward of layers\S* is wrong",
        r"random|\brng\b|dropout",
        r"rows? .{0,30}(lost|missing|dropped)",
    ],
)

WHY = (
    "The backward of `further` runs it again on an input glued from two data parallel replicas, as "
    "the parts are gathered over dp and not tp; its gradients and all below it are wrong, the first "
    "forward, norm and head are right."
)
