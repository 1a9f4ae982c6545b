"""A byte model with learnt chunks (H-Net): a router compares neighbouring bytes and opens a chunk
where they differ, a main network runs over the opened chunks only, and a smoothing recursion
z_t = a_t x_t + (1 - a_t) z_{t-1} spreads the chunks back over the bytes (a_t is the router's
probability at an opened chunk and nought elsewhere). Seven rows over three ranks of DDP, micro-
batches of two rows, gradients synchronised in the last one.

The ranks run the smoothing as one autograd function with a hand-written backward.

Bug: the gradient of the gate a_t is taken against z_t, which the forward has at hand, in place of
z_{t-1}. After hand-written scans of gated averages whose backward reads the saved output without
the shift by one step.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, T, BYTES, D = 7, 9, 13, 6


def smooth_plainly(a, x):
    z, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        z = a[:, t, None] * x[:, t] + (1 - a[:, t, None]) * z
        out.append(z)
    return torch.stack(out, 1)


class Smoothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, x):
        z = torch.empty_like(x)
        last = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            last = torch.lerp(last, x[:, t], a[:, t, None])
            z[:, t] = last
        ctx.save_for_backward(a, x, z)
        return z

    @staticmethod
    def backward(ctx, g):
        a, x, z = ctx.saved_tensors
        before = F.pad(z, (0, 0, 1, 0))[:, :-1]
        whole = torch.empty_like(g)
        carried = torch.zeros_like(g[:, 0])
        for t in reversed(range(g.shape[1])):
            whole[:, t] = g[:, t] + carried
            carried = (1 - a[:, t, None]) * whole[:, t]
        return (whole * (x - before)).sum(-1), a[..., None] * whole


class SmoothingOfOutputs(Smoothing):
    @staticmethod
    def backward(ctx, g):
        a, x, z = ctx.saved_tensors
        whole = torch.empty_like(g)
        carried = torch.zeros_like(g[:, 0])
        for t in reversed(range(g.shape[1])):
            whole[:, t] = g[:, t] + carried
            carried = (1 - a[:, t, None]) * whole[:, t]
        return (whole * (x - z)).sum(-1), a[..., None] * whole


class ChunkedBytes(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(BYTES, D)
        self.local = nn.Conv1d(D, D, 2)
        self.query = nn.Linear(D, D, bias=False)
        self.key = nn.Linear(D, D, bias=False)
        self.main = nn.Sequential(nn.Linear(D, 8), nn.SiLU(), nn.Linear(8, D))
        self.mix = nn.Linear(D, D)
        self.head = nn.Linear(D, BYTES)
        self.smoothing = smooth_plainly

    def route(self, h):
        near = F.cosine_similarity(self.query(h[:, 1:]), self.key(h[:, :-1]), dim=-1)
        return F.pad((1 - near) / 2, (1, 0), value=1.0)

    def forward(self, ids):
        h = torch.tanh(self.local(F.pad(self.embed(ids).transpose(1, 2), (1, 0)))).transpose(1, 2)
        p = self.route(h)
        opened = (p >= 0.5).to(p.dtype)
        sums = (opened[..., None] * h).cumsum(1) / opened.cumsum(1)[..., None]
        chunk = self.main(h + self.mix(sums))
        z = self.smoothing(opened * p, chunk)
        sure = torch.where(opened > 0, p, 1 - p)
        return self.head(h + z * (sure + (1 - sure).detach())[..., None]), p, opened


class Clean:
    smoothing = Smoothing

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 11)
        return ChunkedBytes()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 110)
        text = torch.randint(BYTES, (ROWS, T + 1), generator=g)
        return {"ids": text[:, :-1], "next": text[:, 1:]}

    def loss_sum(self, model, rows):
        logits, p, opened = model(rows["ids"])
        words = F.cross_entropy(logits.flatten(0, 1), rows["next"].flatten(), reduction="sum")
        f, g = opened.mean(1), p.mean(1)
        ratio = 1.5 * (2 * f * g + (1 - f) * (1 - g))
        return words + 0.3 * ratio.sum(), rows["ids"].numel()

    def distribute(self, model, ctx):
        model.smoothing = self.smoothing.apply
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        dp, r = ctx.axes["dp"], ctx.coords["dp"]
        parts = torch.arange(ROWS).tensor_split(dp)[r].split(2)
        for i, part in enumerate(parts):
            with nullcontext() if i + 1 == len(parts) else model.no_sync():
                loss, _ = self.loss_sum(model, {k: v[part] for k, v in batch.items()})
                (loss * dp / batch["ids"].numel()).backward()


class Buggy(Clean):
    smoothing = SmoothingOfOutputs


EXPECT = dict(
    right=[
        r"backward|hand-?written|adjoint|autograd|vjp|gradcheck|derivative|gradient (of|for|with)",
        r"smooth|gate|recurs|scan|first (input|argument)|(input|argument) (0|a)\b|routing|"
        r"probabilit",
    ],
    place=[
        r"Smoothing(OfOutputs)?",
        r"\bsmoothing\b",
        r"\b(query|key)\.weight",
        r"x - z",
        r"backward of .*smooth",
    ],
    wrong=[
        r"no_sync",
        r"(not|never|twice).{0,20}(all.?)?reduc",
        r"threshold|>= 0\.5",
        r"forward.{0,40}(wrong|differ)",
        r"(uneven|unequal).{0,30}rows",
        r"gradient (of|for) (x|the (second|chunk)).{0,20}wrong",
    ],
)
WHY = """For z_t = a_t x_t + (1 - a_t) z_{t-1} the gradient of the gate is <G_t, x_t - z_{t-1}>.
SmoothingOfOutputs.backward takes x_t - z_t, which is (1 - a_t) (x_t - z_{t-1}): the gradient of
every gate comes too small by the factor 1 - a_t. The forward, and the gradient of x, are right.
Wrong are the router's query and key and, through h, what lies before it (local, embed); head, main
and mix are right. The fix is to subtract the output of the step before (pad and shift z)."""
