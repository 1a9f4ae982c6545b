"""A switch layer with a capacity and a balance loss, experts cut over two expert ranks with all-to-all, data parallelism of two. After
reports on Megatron and DeepSpeed MoE about the expert-data-parallel group: the gradient of the experts is reduced over a group of the
right size that holds other experts.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "ep": 2}}}}
ROWS, LENGTH, INPUTS, WIDTH, CLASSES, EXPERTS, CAPACITY, MICRO = 11, 6, 5, 8, 5, 4, 2, 2
BALANCE = 0.05


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, out_splits, in_splits, group):
        ctx.rest = in_splits, out_splits, group
        out = x.new_empty(sum(out_splits), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), out_splits, in_splits, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        in_splits, out_splits, group = ctx.rest
        out = grad.new_empty(sum(in_splits), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), in_splits, out_splits, group=group)
        return out, None, None, None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Switch(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.norm = nn.Linear(INPUTS, WIDTH), nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def local(self, x, choice):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            (at,) = (choice == e).nonzero(as_tuple=True)
            out = out.index_add(0, at, expert(x[at]))
        return out

    def forward(self, x, mix=None):
        """Logits, and the balance loss of each row (capacity and balance are per row)."""
        x = torch.tanh(self.enter(x))
        y = self.norm(x)
        probabilities = self.router(y).softmax(-1)
        gate, choice = probabilities.max(-1)
        hot = F.one_hot(choice, EXPERTS)
        place = (hot.cumsum(1) * hot).sum(-1)
        kept = (place <= CAPACITY).flatten().nonzero()[:, 0]
        mixed = (mix or self.local)(y.flatten(0, 1)[kept], choice.flatten()[kept])
        mixed = mixed * gate.flatten()[kept, None]
        x = x.flatten(0, 1).index_add(0, kept, mixed).view_as(x)
        share = hot.to(x.dtype).mean(1)
        balance = EXPERTS * (share * probabilities.mean(1)).sum(-1)
        return self.head(x), balance


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Switch()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, LENGTH, INPUTS, generator=g),
            "y": torch.randint(CLASSES, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows, mix=None):
        logits, balance = model(rows["x"], mix)
        loss = F.cross_entropy(logits.flatten(0, 1), rows["y"].flatten(), reduction="sum")
        return loss + BALANCE * LENGTH * balance.sum(), rows["y"].numel()

    def distribute(self, model, ctx):
        for e, place in enumerate(torch.arange(EXPERTS) // (EXPERTS // ctx.axes["ep"])):
            if place != ctx.coords["ep"]:
                model.experts[e] = nn.Identity()
        return model

    def expert_group(self, ctx):
        return ctx.group("dp")  # the ranks that hold the same experts

    def step(self, model, batch, ctx):
        group, n = ctx.group("ep"), ctx.axes["ep"]
        each = EXPERTS // n

        def mix(x, choice):
            order = choice.argsort(stable=True)
            sent = torch.bincount(choice // each, minlength=n)
            got = torch.empty_like(sent)
            dist.all_to_all_single(got, sent, group=group)
            sent, got = sent.tolist(), got.tolist()
            there = AllToAll.apply(x[order], got, sent, group)
            which = AllToAll.apply(choice[order], got, sent, group)
            back = AllToAll.apply(model.local(there, which), sent, got, group)
            return torch.zeros_like(x).index_copy(0, order, back)

        part = ctx.coords["dp"] * n + ctx.coords["ep"]
        mine = {k: v.tensor_split(ctx.axes["dp"] * n)[part] for k, v in batch.items()}
        for m in range(MICRO):
            loss, _ = self.loss_sum(
                model, {k: v.tensor_split(MICRO)[m] for k, v in mine.items()}, mix
            )
            (loss / batch["y"].numel()).backward()
        for name, p in model.named_parameters():
            if name.startswith("experts."):
                dist.all_reduce(p.grad, group=self.expert_group(ctx))
            else:
                dist.all_reduce(p.grad)


class Buggy(Clean):
    def expert_group(self, ctx):
        return ctx.group("ep")


EXPECT = dict(
    right=[
        r"expert",
        r"\bep\b|\bdp\b|wrong group|other group|(other|different|another) experts?|expert.?parallel|data.?parallel",
    ],
    place=[r"experts"],
    wrong=[
        r"mean of (the )?means|own (count|denominator|divisor)",
        r"(router|enter|norm|head)\S* (is|are|has|have) (a )?(wrong|missing|partial)",
        r"all.?to.?all.{0,40}(backward|wrong)",
        r"balance (loss|term).{0,30}(missing|lost|dropped)",
        r"capacity.{0,40}(wrong|differ)",
    ],
)
WHY = (
    "The gradients of the experts are all-reduced over the ep group, where each rank holds other experts (0 is summed with 2, 1 with 3), "
    "and not over dp, where the copies of the same expert are. Each expert's gradient is a mix of two experts of one dp rank and lacks "
    "the other dp rank's tokens. Router, enter, norm and head are right."
)
