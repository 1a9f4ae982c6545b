"""Expert parallelism by all-to-all; the router's probability scales what an expert returns.
After FAULTS C07-12: the probabilities are taken out of the graph on their way."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collective
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"ep": 3}}}}
ROWS, LENGTH, WIDTH, EXPERTS, VOCAB = 10, 3, 8, 6, 12
Z = 0.01


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


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(e): Expert() for e in range(EXPERTS)})


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.moe, self.head = Moe(), nn.Linear(WIDTH, VOCAB)


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

    def gates(self, logits):
        probabilities = logits.softmax(-1)
        top, chosen = probabilities.max(-1)
        return top, chosen

    def loss_sum(self, model, rows):
        def local(x, chosen):
            return self.compute(model, x, chosen)

        return self.forward(model, rows, local), rows["ids"].numel()

    def forward(self, model, rows, mixed):
        x = model.embed(rows["ids"].flatten())
        h = model.norm(x)
        logits = 4 * model.moe.router(h)
        gate, chosen = self.gates(logits)
        x = x + gate[:, None] * mixed(h, chosen)
        loss = F.cross_entropy(model.head(x), rows["labels"].flatten(), reduction="sum")
        return loss + Z * logits.logsumexp(-1).square().sum()

    @staticmethod
    def compute(model, x, which):
        done = torch.zeros_like(x)
        for e, expert in model.moe.experts.items():
            at = torch.nonzero(which == int(e))[:, 0]
            done = done.index_add(0, at, expert(x[at]))
        return done

    def distribute(self, model, ctx):
        each = EXPERTS // ctx.axes["ep"]
        for e in range(EXPERTS):
            if e // each != ctx.coords["ep"]:
                del model.moe.experts[str(e)]
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}

        def remote(x, chosen):
            each = EXPERTS // ctx.axes["ep"]
            order, back = dispatch(
                x, chosen, each, ctx.group("ep"), lambda t, w: self.compute(model, t, w)
            )
            return torch.zeros_like(back).index_copy(0, order, back)

        (self.forward(model, mine, remote) / (ROWS * LENGTH)).backward()
        for name, param in model.named_parameters():
            if "experts" not in name:
                dist.all_reduce(param.grad)


class Buggy(Clean):
    def step(self, model, batch, ctx):
        self.detached = True
        super().step(model, batch, ctx)
        self.detached = False

    detached = False

    def gates(self, logits):
        top, chosen = super().gates(logits)
        return (top.detach() if self.detached else top), chosen


EXPECT = dict(
    right=[
        r"router",
        r"detach|no gradient|lost|missing|backward|only (one|part|the)|term|path|not reached",
    ],
    place=[r"router"],
    wrong=[r"never reduced|not reduced|missing reduction", r"counted (twice|3 times)", r"averag"],
)
WHY = (
    "The gate probabilities are detached in the step, so moe.router gets the gradient of its "
    "z-loss only, and norm/embed miss the part that comes through the router."
)
