"""Expert parallelism: tokens are sorted by expert for the all-to-all and put back after it.
After reports on MoE token permutation: the inverse permutation is applied the wrong way."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collective
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"ep": 2}}}}
ROWS, LENGTH, WIDTH, EXPERTS, VOCAB = 9, 3, 8, 6, 15


def dispatch(x, chosen, per_rank, group, compute):
    """Send every token to the rank of its expert, compute there, bring the result back."""
    size = dist.get_world_size(group)
    order = torch.argsort(chosen, stable=True)
    sent = torch.bincount(chosen // per_rank, minlength=size)
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    sizes = got.tolist(), sent.tolist()
    which = torch.empty(int(got.sum()), dtype=torch.int64)
    dist.all_to_all_single(which, chosen[order].contiguous(), *sizes, group=group)
    there = torch.empty(len(which), x.shape[1], dtype=x.dtype)
    there = collective.all_to_all_single(there, x[order], *sizes, group=group)
    done = compute(there, which)
    back = torch.empty_like(x)
    back = collective.all_to_all_single(back, done, *reversed(sizes), group=group)
    return order, back


class GroupedExperts(nn.Module):
    """Weights of all experts in one tensor each."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, 7) / 3)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, 7, WIDTH) / 3)

    def forward(self, x, which):
        out = torch.zeros_like(x)
        for e in range(len(self.w1)):
            at = torch.nonzero(which == e)[:, 0]
            out = out.index_add(0, at, F.silu(x[at] @ self.w1[e]) @ self.w2[e])
        return out


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), GroupedExperts()

    def forward(self, x, exchange=None):
        weight, chosen = (4 * self.gate(x)).softmax(-1).max(-1)
        if exchange is None:
            return weight[:, None] * self.experts(x, chosen)
        return weight[:, None] * exchange(x, chosen, self.experts)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(WIDTH), Moe()

    def forward(self, x, exchange):
        return x + self.moe(self.norm(x), exchange)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, exchange=None):
        x = self.embed(ids.flatten())
        for layer in self.layers:
            x = layer(x, exchange)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCAB, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCAB, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows, exchange=None):
        logits, labels = model(rows["ids"], exchange), rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()

    def distribute(self, model, ctx):
        for layer in model.layers:
            experts = layer.moe.experts
            for name in ("w1", "w2"):
                part = getattr(experts, name).chunk(ctx.axes["ep"])[ctx.coords["ep"]]
                setattr(experts, name, nn.Parameter(part.detach().clone()))
        return model

    def unpermute(self, back, order):
        return torch.zeros_like(back).index_copy(0, order, back)

    def step(self, model, batch, ctx):
        each, group = EXPERTS // ctx.axes["ep"], ctx.group("ep")
        first = each * ctx.coords["ep"]

        def exchange(x, chosen, experts):
            order, back = dispatch(x, chosen, each, group, lambda t, w: experts(t, w - first))
            return self.unpermute(back, order)

        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine, exchange)
        (loss / (ROWS * LENGTH)).backward()
        for name, param in model.named_parameters():
            if "experts" not in name:
                dist.all_reduce(param.grad)


class Buggy(Clean):
    def unpermute(self, back, order):
        return back[order]


EXPECT = dict(
    right=[r"forward|output|activation", r"moe|experts"],
    place=[r"layers\.0\.moe", r"layers\.0"],
    wrong=[r"never reduced|not reduced|missing reduction", r"counted twice", r"averag"],
)
WHY = (
    "After the all-to-all tokens are put back with back[order] not its inverse, so outputs of "
    "layers.0.moe belong to other tokens on both ranks."
)
