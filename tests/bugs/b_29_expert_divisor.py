"""Expert parallelism with averaging: dense gradients over the world, experts over the ranks that
hold them. After FAULTS C09-02: the experts' average divides by the wrong size."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collective
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "ep": 2}}}}
ROWS, LENGTH, WIDTH, EXPERTS, VOCAB = 8, 4, 8, 4, 12


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
        self.w1, self.w2 = nn.Linear(WIDTH, 10, bias=False), nn.Linear(10, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(e): Expert() for e in range(EXPERTS)})
        self.head = nn.Linear(WIDTH, VOCAB)


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

    def loss_sum(self, model, rows):
        loss = self.forward(model, rows, lambda x, chosen: self.compute(model, x, chosen))
        return loss, rows["ids"].numel()

    def forward(self, model, rows, mixed):
        x = model.embed(rows["ids"].flatten())
        h = model.norm(x)
        gate, chosen = (4 * model.router(h)).softmax(-1).max(-1)
        x = x + gate[:, None] * mixed(h, chosen)
        return F.cross_entropy(model.head(x), rows["labels"].flatten(), reduction="sum")

    @staticmethod
    def compute(model, x, which):
        done = torch.zeros_like(x)
        for e, expert in model.experts.items():
            at = torch.nonzero(which == int(e))[:, 0]
            done = done.index_add(0, at, expert(x[at]))
        return done

    def distribute(self, model, ctx):
        each = EXPERTS // ctx.axes["ep"]
        for e in range(EXPERTS):
            if e // each != ctx.coords["ep"]:
                del model.experts[str(e)]
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}

        def remote(x, chosen):
            each = EXPERTS // ctx.axes["ep"]
            order, back = dispatch(
                x, chosen, each, ctx.group("ep"), lambda t, w: self.compute(model, t, w)
            )
            return torch.zeros_like(back).index_copy(0, order, back)

        (self.forward(model, mine, remote) / mine["ids"].numel()).backward()
        for name, param in model.named_parameters():
            if name.startswith("experts"):
                dist.all_reduce(param.grad, group=ctx.group("dp"))
                param.grad /= self.expert_divisor(ctx)
            else:
                dist.all_reduce(param.grad)
                param.grad /= ctx.world_size

    def expert_divisor(self, ctx):
        """An expert's gradient has the tokens of all ranks of ep already."""
        return ctx.axes["dp"] * ctx.axes["ep"]


class Buggy(Clean):
    def expert_divisor(self, ctx):
        return ctx.axes["dp"]


EXPECT = dict(
    right=[r"experts", r"\b2\.0|times 2|2 times|twice|double|\bep\b"],
    place=[r"experts"],
    wrong=[
        r"never reduced|not reduced|missing reduction",
        r"\bforward (is )?wrong",
        r"router.*wrong",
    ],
)
WHY = (
    "Experts' gradients are divided by the size of dp only, though they have the tokens of both ep "
    "ranks: every expert's gradient is twice too large, the rest is right."
)
