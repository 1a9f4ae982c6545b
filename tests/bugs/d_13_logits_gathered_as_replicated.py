"""Policy training with a vocabulary-parallel head whose logits are gathered on every tp rank. After
FAULTS C06-10 (torchtitan PR 3822): the gather's adjoint sums the ranks' equal gradients.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"trainer": {"axes": {"dp": 2, "tp": 2}}}}

ROWS, LENGTH, WIDTH, HIDDEN, VOCABULARY, KL, VALUE = 9, 5, 8, 14, 18, 0.2, 0.4


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


class Gather(torch.autograd.Function):
    """Of the last dimension. `invariant`: what follows is the same on all ranks, and so its gradient."""

    @staticmethod
    def forward(ctx, x, group, invariant):
        ctx.group, ctx.invariant = group, invariant
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx, grad):
        if not ctx.invariant:
            grad = grad.clone()
            dist.all_reduce(grad, group=ctx.group)
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return grad.chunk(size, dim=-1)[rank], None, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.mix = nn.LayerNorm(WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x, tp):
        x = x + self.mix(self.norm1(x))[0]
        y = self.norm2(x)
        y = y if tp is None else Copy.apply(y, tp)
        y = self.down(F.gelu(self.up(y)))
        return x + (y if tp is None else Reduce.apply(y, tp))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.value = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, tp=None, invariant=True):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, tp)
        x = self.norm(x)
        value = self.value(x)[..., 0]
        if tp is None:
            return self.head(x), value
        return Gather.apply(self.head(Copy.apply(x, tp)), tp, invariant), value


class Clean:
    invariant = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Policy()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        shape = ROWS, LENGTH
        return {
            "ids": torch.randint(VOCABULARY, shape, generator=g),
            "actions": torch.randint(VOCABULARY, shape, generator=g),
            "reference": -2.9 + 0.2 * torch.randn(shape, generator=g),
            "advantages": torch.randn(ROWS, 1, generator=g),
            "returns": torch.randn(shape, generator=g),
        }

    def loss_sum(self, model, rows, tp=None):
        logits, value = model(rows["ids"], tp, self.invariant)
        logp = logits.log_softmax(-1).gather(-1, rows["actions"][..., None])[..., 0]
        away = rows["reference"] - logp
        loss = -logp * rows["advantages"] + KL * (away.exp() - away - 1)
        loss = loss + VALUE * F.huber_loss(value, rows["returns"], reduction="none")
        return loss.sum(), loss.numel()

    @staticmethod
    def cut(name):
        if name == "head.weight" or ".up." in name:
            return 0
        return 1 if ".down." in name else None

    def shard_of(self, name, ctx):
        dim = self.cut(name)
        if dim is None:
            return None
        n = {"head": VOCABULARY}.get(name.split(".")[0], HIDDEN) // ctx.axes["tp"]
        at = slice(n * ctx.coords["tp"], n * (ctx.coords["tp"] + 1))
        return (slice(None),) * dim + (at,)

    def distribute(self, model, ctx):
        for name, param in model.named_parameters():
            if self.cut(name) is not None:
                param.data = param.data[self.shard_of(name, ctx)].clone()
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine, ctx.group("tp"))
        (loss / (ROWS * LENGTH)).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    invariant = False


EXPECT = dict(
    right=[
        r"head|logits|gather|adjoint|policy|backward",
        r"backward|adjoint|gradient|counted|twice|two times|2 times|times 2|x ?2|\b2(\.0+)?\b|again|double|factor"
        r"|too large|tp\b",
    ],
    place=[r"head", r"gather|logits", r"\btp\b"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"\bforward (is )?wrong|first wrong forward|forward (pass )?(is wrong|differs)",
        r"rows? .{0,30}(lost|missing|dropped)",
        r"value\.\S* (is|has) (counted|too)",
    ],
)

WHY = (
    "The adjoint of the logits' gather sums the tp ranks' gradients although all ranks compute the "
    "same loss: head.weight and the policy and KL part of everything below are doubled, the value "
    "head's part is right; the forward is right."
)
