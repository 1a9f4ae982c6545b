"""Perceiver-like latents that read tokens cut over ranks; the latents' update is a sum over ranks beside a skip path. After
FAULTS C13-07/C08 (buffers and copies) and pytorch's rule that a Function must not change grad_output in place: the
backward's all-reduce works on the very tensor that autograd hands to the skip path, too.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, TOKENS, FEATURES, LATENTS, WIDTH = 5, 11, 4, 3, 6


class Total(torch.autograd.Function):
    """A sum over ranks of which each rank uses the result for its own tokens."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class TotalInPlace(Total):
    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.query = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, latents, x, total):
        memory = F.softplus(self.key(x)).mT @ self.value(x) / TOKENS
        return latents + total(F.softplus(self.query(self.norm(latents))) @ memory)


class Perceiver(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Linear(FEATURES, WIDTH)
        self.latents = nn.Parameter(torch.randn(LATENTS, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.ask = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, FEATURES)

    def forward(self, x, total=lambda x: x):
        x = torch.tanh(self.tokens(x))
        z = self.latents.expand(len(x), -1, -1)
        for layer in self.layers:
            z = layer(z, x, total)
        z = self.norm(z)
        weights = (self.ask(x) @ z.mT / WIDTH**0.5).softmax(-1)
        return self.out(x + weights @ z)


class Clean:
    total = Total

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Perceiver()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        shape = ROWS, TOKENS, FEATURES
        return {
            "x": torch.randn(shape, generator=g),
            "y": torch.randn(shape, generator=g),
            "mask": torch.arange(TOKENS) < torch.randint(3, TOKENS + 1, (ROWS, 1), generator=g),
        }

    @staticmethod
    def token_loss(guess, rows):
        return ((guess - rows["y"]).square().sum(-1) * rows["mask"]).sum()

    def loss_sum(self, model, rows):
        return self.token_loss(model(rows["x"]), rows), rows["mask"].sum()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size, dim=1)[ctx.rank] for k, v in batch.items()}
        loss = self.token_loss(model(mine["x"], self.total.apply), mine)
        (loss / batch["mask"].sum()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    total = TotalInPlace


EXPECT = dict(
    right=[
        r"latents|layers\.0|tokens|layers\.\d|skip|residual|upstream",
        r"twice|three times|[23] times|[x\u00d7]\s?3|3\s?[x\u00d7]|too (large|big|much|often)|again|over-?count|more than once|in.?place|alias|overwrit|already (reduced|summed|complete)|"
        r"adjoint|backward of (the|a) (sum|collective|total|all.?reduce)|double|factor|doubly",
    ],
    place=[
        r"latents",
        r"layers\.[01]",
        r"skip|residual",
        r"backward|collective|all.?reduce",
        r"\bcp\b",
    ],
    wrong=[
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"(is|are|was|were) (never|not) (been )?(all.?)?reduced over|missing (all.?)?reduc",
        r"\b(out|ask)\.\S* (is|are|was|were) (wrong|counted|reduced)",
        r"layers\.1\S* (is|are|was|were) (wrong|counted|reduced)",
        r"mean of (the )?(rank |ranks' )?means",
        r"rows? .{0,30}(lost|missing|dropped)",
    ],
)
WHY = (
    "An addition hands the same gradient tensor to the skip path and to the sum over ranks; the latter's backward all-reduces it in place, so the skip path, which must stay partial, is summed over the 3 ranks as well and "
    "counts 3 times after the next sum. Wrong are `latents`, layers.0 and, through its keys and values, `tokens`; layers.1, norm, ask and out are exact."
)
