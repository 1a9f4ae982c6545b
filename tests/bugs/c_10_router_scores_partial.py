"""Experts cut over ep with the same tokens on every ep rank; scores of the other ranks' experts are zeroed.
After FAULTS C05-08 (transformers PR 48205: missing gradient contributions in expert parallel training)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "ep": 2}}}}
ROWS, LENGTH, VOCAB, WIDTH, EXPERTS, TOP = 7, 4, 13, 8, 4, 2


class ToExperts(torch.autograd.Function):
    """Identity; each rank's experts give a part of the gradient, which is summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class FromExperts(torch.autograd.Function):
    """The sum over the ranks' experts."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 10) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 5, WIDTH) / 2)

    def forward(self, x, scores):
        """All tokens through every expert held here, weighted by its score."""
        gate, up = torch.einsum("td,edf->etf", x, self.gate_up).chunk(2, dim=-1)
        y = torch.einsum("etf,efd->etd", F.silu(gate) * up, self.down)
        return (y * scores.T[..., None]).sum(0)


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x, parallel=None):
        probs = (2 * self.router(x)).softmax(-1)
        top, chosen = probs.topk(TOP, dim=-1)
        scores = torch.zeros_like(probs).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
        if parallel is None:
            return self.experts(x, scores)
        return parallel(self.experts, x, scores)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe = Moe()

    def forward(self, x, parallel):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.moe(self.norm2(x).flatten(0, 1), parallel).view_as(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids, parallel=None):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, parallel)
        return self.lm_head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss_sum(self, model, rows, parallel=None):
        logits, labels = model(rows["ids"], parallel).flatten(0, 1), rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()

    def held(self, ctx):
        each = EXPERTS // ctx.axes["ep"]
        return slice(each * ctx.coords["ep"], each * (ctx.coords["ep"] + 1))

    def shard_of(self, name, ctx):
        if ".experts." in name:
            return (self.held(ctx), slice(None), slice(None))

    def distribute(self, model, ctx):
        for layer in model.layers:
            experts = layer.moe.experts
            for name in ("gate_up", "down"):
                part = getattr(experts, name).detach()[self.held(ctx)].clone()
                setattr(experts, name, nn.Parameter(part))
        return model

    def local_scores(self, scores, ctx):
        return ToExperts.apply(scores, ctx.group("ep"))[:, self.held(ctx)]

    def step(self, model, batch, ctx):
        group = ctx.group("ep")

        def parallel(experts, x, scores):
            y = experts(ToExperts.apply(x, group), self.local_scores(scores, ctx))
            return FromExperts.apply(y, group)

        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine, parallel)
        (loss / batch["labels"].numel()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def local_scores(self, scores, ctx):
        return scores[:, self.held(ctx)]


EXPECT = dict(
    right=[
        r"router|scores?|moe|gate|ep\b",
        (
            r"(not|never|un|without being) ?-?((all-?)?reduced|summed|added)|missing|partial|own (part|share|experts|scores"
            r"|gradient|contribution)|local experts|lacks?|lost|differ\w* (between|on|across|from)|no (all.?)?reduc"
            r"|disagree|backward|only (its|their|the)"
        ),
    ],
    place=[r"router", r"layers\.\d+\.moe", r"\bep\b"],
    wrong=[
        r"(reduced|counted|divided) (twice|again)",
        r"mean of (the )?means",
        r"forward (is|was) wrong|wrong forward|output (is|was) wrong",
        r"(not|never) (reduced|summed) over .{0,12}\bdp\b",
        r"(lm_head|layers\.1\.moe\.experts)\S* (is|are) wrong",
        r"rows? (is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "Routing scores are cut to the rank's own experts without a sum of their gradient over ep: the router, and "
    "through it all that lies before, gets on each ep rank only the score gradient of that rank's experts."
)
