"""A mixture-of-experts tagger: a dense projection, four experts that are mixed by a router, a
classifier.

Parallelism: rows over dp x ep (2 x 2); the experts are stacked in one parameter and cut over ep.
Tokens are collected over ep, each rank applies its own experts and the partial outputs are summed
and delivered. Dense parameters are summed over all four ranks, experts over dp alone: two
gradient queues, filled by hooks.

Bug: the queue's list of pending parameters stands in the class body, so that it is one list for
both queues. The dense queue, which is flushed first, finds the experts in it too and sums them
over all ranks, over ep as well. After hand-written reducers with a shared mutable class attribute
(Megatron-style bucket groups).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "ep": 2}}}}
D, H, E, CLASSES = 7, 5, 4, 3


class Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lo, total, group):
        ctx.lo, ctx.own, ctx.group = lo, x.shape[0], group
        full = x.new_zeros(total, *x.shape[1:])
        full[lo : lo + x.shape[0]] = x
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g[ctx.lo : ctx.lo + ctx.own], None, None, None


class Deliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lo, own, group):
        ctx.lo, ctx.shape, ctx.group = lo, x.shape, group
        full = x.clone()
        dist.all_reduce(full, group=group)
        return full[lo : lo + own].clone()

    @staticmethod
    def backward(ctx, g):
        full = g.new_zeros(ctx.shape)
        full[ctx.lo : ctx.lo + g.shape[0]] = g
        dist.all_reduce(full, group=ctx.group)
        return full, None, None, None


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(E, D, H) * 0.5)
        self.down = nn.Parameter(torch.randn(E, H, D) * 0.5)

    def forward(self, x, gate):
        h = F.silu(torch.einsum("nd,edh->enh", x, self.up))
        return torch.einsum("enh,ehd,ne->nd", h, self.down, gate)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, D)
        self.router = nn.Linear(D, E)
        self.experts = Experts()
        self.head = nn.Linear(D, CLASSES)
        self.exchange = None

    def forward(self, x):
        h = torch.tanh(self.enter(x))
        gate = self.router(h).softmax(-1)
        if self.exchange is None:
            mixed = self.experts(h, gate)
        else:
            lo, total, (e0, e1), group = self.exchange
            every = Collect.apply(h, lo, total, group)
            gates = Collect.apply(gate, lo, total, group)[:, e0:e1]
            mixed = Deliver.apply(self.experts(every, gates), lo, h.shape[0], group)
        return self.head(h + mixed)


class GradQueue:
    """Parameters whose gradient is ready wait here for the reduction over their group."""

    def __init__(self, params, group):
        self.group = group
        self.pending = []
        for p in params:
            p.register_post_accumulate_grad_hook(self.pending.append)

    def flush(self):
        for p in self.pending:
            dist.all_reduce(p.grad, group=self.group)
        self.pending.clear()


class SharedBodyQueue:
    """Parameters whose gradient is ready wait here for the reduction over their group."""

    pending: list[nn.Parameter] = []

    def __init__(self, params, group):
        self.group = group
        for p in params:
            p.register_post_accumulate_grad_hook(self.pending.append)

    def flush(self):
        for p in self.pending:
            dist.all_reduce(p.grad, group=self.group)
        self.pending.clear()


class Clean:
    queue = GradQueue

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Tagger()

    def batch(self):
        g = torch.Generator().manual_seed(400 + self.seed)
        return {
            "x": torch.randn(15, 6, generator=g),
            "tag": torch.randint(0, CLASSES, (15,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["tag"], reduction="sum"), rows["tag"].shape[0]

    def distribute(self, model, ctx):
        per = E // ctx.axes["ep"]
        lo = ctx.coords["ep"] * per
        for name in ("up", "down"):
            whole = getattr(model.experts, name).detach()
            setattr(model.experts, name, nn.Parameter(whole[lo : lo + per].clone()))
        dense = [p for n, p in model.named_parameters() if not n.startswith("experts.")]
        self.dense_queue = self.queue(dense, ctx.group("dp", "ep"))
        self.expert_queue = self.queue(list(model.experts.parameters()), ctx.group("dp"))
        return model

    def step(self, model, batch, ctx):
        n = batch["tag"].shape[0]
        rows = torch.arange(n).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        parts = rows.tensor_split(ctx.axes["ep"])
        e = ctx.coords["ep"]
        per = E // ctx.axes["ep"]
        lo = sum(len(p) for p in parts[:e])
        model.exchange = (lo, len(rows), (e * per, (e + 1) * per), ctx.group("ep"))
        loss, _ = self.loss_sum(model, {k: v[parts[e]] for k, v in batch.items()})
        (loss / n).backward()
        self.dense_queue.flush()
        self.expert_queue.flush()


class Buggy(Clean):
    queue = SharedBodyQueue


EXPECT = dict(
    right=[
        r"class (attribute|body|level|variable)|shared (list|by|between|queue)|one list|"
        r"same list|both queues|pending|dense (queue|group)|all (four )?ranks|world|(over|"
        r"across) (the )?ep|wrong group",
        r"expert|\bup\b|\bdown\b",
    ],
    place=[r"pending", r"queue", r"flush", r"experts\.(up|down)"],
    wrong=[
        r"router .*(no gradient|not reduced)",
        r"Collect.*(backward|adjoint).*(wrong|miss)",
        r"Deliver.*(backward|adjoint).*(wrong|miss)",
        r"experts? (is|are) (not|never) reduced",
    ],
)
WHY = """SharedBodyQueue.pending is a class attribute, so the dense queue and the expert queue
append to one list. dense_queue.flush() comes first, takes the experts' gradients too and sums
them over dp x ep, and clears the list; expert_queue.flush() finds nothing. Gradients of unlike
experts, which lie on the two ep ranks, are added to one another: experts.up and experts.down are
wrong, all dense parameters are right. A right cause says that the experts are reduced over the
dense group (over ep too), because the queues share their pending list. The fix is self.pending =
[] in __init__."""
