"""A mixture of experts on four ranks (two data-parallel, two expert-parallel; three of six experts on each expert rank). The router is sigmoid, the best two experts of each token are taken, their scores are
divided by their sum and then multiplied by the routed scaling factor 2.5. A shared expert is added. The experts' parts are summed over the expert ranks; gradients over the data ranks. Rows 3 and 2,
micro-batches of two; the divisor is the number of tokens.

The bug: in the expert-parallel step the scores are multiplied before they are divided by their sum, which takes the factor out again. After DeepSeek-V3 ports (routed_scaling_factor with norm_topk_prob;
the order differs in reports on vllm, sglang and Megatron-LM's moe_router_topk_scaling_factor).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "ep": 2}}}}
ROWS, LENGTH, WIDTH, WORDS, EXPERTS, BEST, FACTOR, AT_ONCE = 5, 3, 6, 11, 6, 2, 2.5, 2


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ToAllRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def normalised_then_scaled(scores):
    scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return scores * FACTOR


def scaled_then_normalised(scores):
    scores = scores * FACTOR
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * 0.4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.4)

    def forward(self, x, gates):
        """gates: (tokens, own experts), 0 where a token did not choose the expert."""
        y = torch.einsum("tw,ewh->teh", x, self.up)
        y = torch.einsum("teh,ehw->tew", F.silu(y), self.down)
        return (y * gates.unsqueeze(-1)).sum(1)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.weigh, self.held, self.group = normalised_then_scaled, slice(0, EXPERTS), None

    def forward(self, x):
        y = self.norm(x).flatten(0, 1)
        scores, chosen = self.router(y).sigmoid().topk(BEST, -1)
        gates = torch.zeros(len(y), EXPERTS, dtype=y.dtype).scatter(1, chosen, self.weigh(scores))
        if self.group is None:
            routed = self.experts(y, gates)
        else:
            gates = ToAllRanks.apply(gates, self.group)[:, self.held]
            routed = self.experts(ToAllRanks.apply(y, self.group), gates)
            routed = SumOverRanks.apply(routed, self.group)
        return x + (routed + self.shared(y)).view_as(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Mixture() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, rows):
        x = self.words(rows["ids"])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(
            self.head(x).flatten(0, 1), rows["labels"].flatten(), reduction="sum"
        )


class Clean:
    weigh = staticmethod(normalised_then_scaled)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows):
        return model(rows), rows["labels"].numel()

    def distribute(self, model, ctx):
        each = EXPERTS // ctx.axes["ep"]
        held = slice(ctx.coords["ep"] * each, (ctx.coords["ep"] + 1) * each)
        for layer in model.layers:
            experts = layer.experts
            experts.up = nn.Parameter(experts.up.detach()[held].clone())
            experts.down = nn.Parameter(experts.down.detach()[held].clone())
            layer.held, layer.group = held, ctx.group("ep")
            layer.weigh = self.weigh
        return model

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        for part in zip(*(v.split(AT_ONCE) for v in mine.values())):
            (model(dict(zip(mine, part))) / batch["labels"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    weigh = staticmethod(scaled_then_normalised)


EXPECT = dict(
    right=[
        r"experts|gates?|weigh|layers|scores|routed|router",
        r"factor|2\.5|0\.4|scal|forward|argument|input|times|constant|ratio|differ",
    ],
    place=[r"experts|gates?|weigh|routed|layers"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"mean of (the )?means|wrong divisor|own count",
        r"(other|wrong) experts? (are|is) chosen|shared expert .{0,20}(scaled|twice|wrong)",
        r"only (on )?rank [0-3]\b|backward formula",
    ],
)
WHY = (
    "In both layers' `weigh`, on all four ranks, in all micro-batches: the two gates of a token sum to 1, right is 2.5; each is 0.4 of the right one. The choice of experts, the ratio of the gates, the "
    "shared expert, router scores of layer 0 are right. The first wrong value is layers.0's gates (the experts' second argument), then the routed sum, which is 0.4 times the right one in layer 0; what "
    "follows is wrong. Copy, sum, cut of experts, divisor 15, the sum over dp are right. Fix: divide by the sum first, multiply by FACTOR after it."
)
