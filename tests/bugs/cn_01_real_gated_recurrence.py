"""A small Griffin-like language model (RG-LRU blocks): rows over dp (2; 3 and 2 rows, micro-batches
of two), the 7 recurrent channels cut over tp (2; 4 and 3). Ranks run the recurrence
h_t = a_t h_{t-1} + sqrt(1 - a_t^2) u_t as a fused function of log a_t and u_t, with a backward by
hand, as a kernel would have it.

Bug: in the backward, the derivative of the input normaliser sqrt(1 - a^2) is taken with respect to
a and added to the gradient of log a: one factor a is missing. After reports on ports of
linear-recurrence kernels whose gate is kept in log space.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
WORDS, D, C, T, ROWS, SHARPNESS = 11, 6, 7, 8, 5, 4.0


def plain_recurrence(log_a, u):
    a = log_a.exp()
    h, out = torch.zeros_like(u[:, 0]), []
    for t in range(u.shape[1]):
        h = a[:, t] * h + (1 - a[:, t].square()).sqrt() * u[:, t]
        out.append(h)
    return torch.stack(out, 1)


class FusedRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_a, u):
        a = log_a.exp()
        scale = torch.sqrt(-torch.expm1(2 * log_a))
        h, out = torch.zeros_like(u[:, 0]), []
        for t in range(u.shape[1]):
            h = a[:, t] * h + scale[:, t] * u[:, t]
            out.append(h)
        out = torch.stack(out, 1)
        ctx.save_for_backward(a, scale, u, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        a, scale, u, out = ctx.saved_tensors
        before = F.pad(out, (0, 0, 1, 0))[:, :-1]
        carry, flow = torch.zeros_like(u[:, 0]), torch.empty_like(u)
        for t in reversed(range(u.shape[1])):
            flow[:, t] = grad[:, t] + carry
            carry = a[:, t] * flow[:, t]
        grad_log_a = flow * before * a - flow * u * a.square() / scale
        return grad_log_a, flow * scale


class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.enter = nn.Linear(D, C)
        self.side = nn.Linear(D, C)
        self.keep_weight, self.keep_bias = (nn.Parameter(torch.randn(C)) for _ in "ab")
        self.input_weight, self.input_bias = (nn.Parameter(torch.randn(C)) for _ in "ab")
        self.decay = nn.Parameter(torch.randn(C) - 1.5)
        self.leave = nn.Linear(C, D, bias=False)
        self.recurrence, self.group = plain_recurrence, None

    def forward(self, x):
        h = self.norm(x)
        if self.group is not None:
            h = CopyIn.apply(h, self.group)
        u = self.enter(h)
        keep = torch.sigmoid(u * self.keep_weight + self.keep_bias)
        let_in = torch.sigmoid(u * self.input_weight + self.input_bias)
        log_a = -SHARPNESS * F.softplus(self.decay) * keep
        y = self.leave(self.recurrence(log_a, let_in * u) * F.gelu(self.side(h)))
        return x + (y if self.group is None else SumOut.apply(y, self.group))

    def cut(self, own):
        for layer in (self.enter, self.side):
            layer.weight = nn.Parameter(layer.weight.detach()[own].clone())
            layer.bias = nn.Parameter(layer.bias.detach()[own].clone())
        for name in ("keep_weight", "keep_bias", "input_weight", "input_bias", "decay"):
            setattr(self, name, nn.Parameter(getattr(self, name).detach()[own].clone()))
        self.leave.weight = nn.Parameter(self.leave.weight.detach()[:, own].clone())


class Griffin(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, D)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, WORDS)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 11)
        return Griffin()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 110)
        return {"ids": torch.randint(WORDS, (ROWS, T + 1), generator=g)}

    def loss_sum(self, model, rows):
        ids = rows["ids"]
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        return loss, ids[:, 1:].numel()

    def recurrence(self):
        return FusedRecurrence.apply

    def distribute(self, model, ctx):
        own = torch.arange(C).tensor_split(ctx.axes["tp"])[ctx.coords["tp"]]
        for block in model.blocks:
            block.cut(own)
            block.recurrence, block.group = self.recurrence(), ctx.group("tp")
        return model

    def step(self, model, batch, ctx):
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in own.split(2):
            loss, _ = self.loss_sum(model, {"ids": batch["ids"][part]})
            (loss / (ROWS * T)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class GriffinScan(FusedRecurrence):
    @staticmethod
    def backward(ctx, grad):
        a, scale, u, out = ctx.saved_tensors
        before = F.pad(out, (0, 0, 1, 0))[:, :-1]
        carry, flow = torch.zeros_like(u[:, 0]), torch.empty_like(u)
        for t in reversed(range(u.shape[1])):
            flow[:, t] = grad[:, t] + carry
            carry = a[:, t] * flow[:, t]
        grad_log_a = flow * before * a - flow * u * a / scale
        return grad_log_a, flow * scale


class Buggy(Clean):
    def recurrence(self):
        return GriffinScan.apply


EXPECT = dict(
    right=[
        r"backward|derivative|adjoint|gradient formula|jacobian|VJP",
        r"log_a|log.?(space|decay|gate)|\bdecay|sqrt|normali[sz]er|scale|1\s*-\s*a",
        r"GriffinScan|recurrence|scan|factor|missing|chain rule|grad_log_a",
    ],
    place=[r"GriffinScan", r"grad_log_a", r"flow \* u \* a", r"recurrence"],
    wrong=[
        r"(not|never|missing|twice).{0,25}(all.?)?reduc\w* over (dp|tp)",
        r"CopyIn.{0,40}(wrong|miss)",
        r"SumOut.{0,40}(wrong|miss)",
        r"carry.{0,40}(wrong|shift|missing)",
        r"wrong (forward|output)",
        r"mean of (the )?means",
    ],
)
WHY = """The forward of GriffinScan is right; the second result (gradient of u) too. For log_a,
d sqrt(1 - a^2) / d log a = -a^2 / sqrt(1 - a^2), but the backward has -a / sqrt(1 - a^2), the
derivative with respect to a itself. So the gradients of decay, keep_weight and keep_bias are
wrong, and through u everything before them. A right cause names the backward of the scan, its
gradient of log_a. The fix is a.square() in place of a in the last term of grad_log_a."""
