"""Second-order meta-learning (MAML with a learnt inner step size for each tensor, as Meta-SGD) of a
small regressor over 8 tasks with five support and four query points; tasks over dp (3): 3, 3 and 2,
in micro-batches of two tasks. Meta-gradients come from torch.autograd.grad as a tuple; tuples of
the micro-batches are added up and put into .grad before the reduction.

Bug: the tuples are added with `+`, which puts the second tuple behind the first instead of adding
its tensors. The parameters are then matched with the first micro-batch's gradients, and what
follows in the long tuple is never read. After hand-written gradient accumulation with
autograd.grad.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
TASKS, SUPPORT, QUERY, FEATURES, HIDDEN = 8, 5, 4, 2, 7


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
        self.log_rate = nn.ParameterDict(
            {
                name.replace(".", "_"): nn.Parameter(torch.randn(()) * 0.3 - 1.5)
                for name, _ in self.net.named_parameters()
            }
        )

    def forward(self, support, query):
        """Query error (summed) of one task after one step on its support points."""
        start = dict(self.net.named_parameters())
        error = (functional_call(self.net, start, support[:, :-1])[:, 0] - support[:, -1]).square()
        slopes = torch.autograd.grad(error.mean(), list(start.values()), create_graph=True)
        adapted = {
            name: p - self.log_rate[name.replace(".", "_")].exp() * slope
            for (name, p), slope in zip(start.items(), slopes, strict=True)
        }
        return (functional_call(self.net, adapted, query[:, :-1])[:, 0] - query[:, -1]).square()


def add_up(total, grads):
    return tuple(a + b for a, b in zip(total, grads, strict=True)) if total else grads


def put_together(total, grads):
    return total + grads


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 4)
        return Learner()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 40)
        phase, height = torch.rand(2, TASKS, 1, generator=g) * 2 + 0.5
        x = torch.randn(TASKS, SUPPORT + QUERY, FEATURES, generator=g)
        y = height * torch.sin(x.sum(-1) + phase)
        points = torch.cat([x, y[..., None]], -1)
        return {"support": points[:, :SUPPORT], "query": points[:, SUPPORT:]}

    def loss_sum(self, model, rows):
        tasks = range(rows["support"].shape[0])
        return (
            torch.stack([model(rows["support"][i], rows["query"][i]).sum() for i in tasks]).sum(),
            len(tasks) * QUERY,
        )

    def accumulate(self, total, grads):
        return add_up(total, grads)

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        own = torch.arange(TASKS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        params, total = list(model.parameters()), ()
        for tasks in own.split(2):
            loss, _ = self.loss_sum(model, {k: v[tasks] for k, v in batch.items()})
            grads = torch.autograd.grad(loss / (TASKS * QUERY), params)
            total = self.accumulate(total, grads)
        for i, p in enumerate(params):
            p.grad = total[i].clone()
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def accumulate(self, total, grads):
        return put_together(total, grads)


EXPECT = dict(
    right=[
        r"micro.?batch|accumul|second (part|chunk|half|group)|later (tasks|part|chunk)|tuple|"
        r"put_together|last (row|task)s?|(rows?|tasks?).{0,12}\b(2|5)\b",
        r"lost|dropp|never|not (added|accumulated|counted|included|in)|ignored|missing|miss\b|"
        r"discard|only the first|concaten|no contribution|left out|contribut\w+ (nothing|0|zero)|"
        r"absent|unread|without",
    ],
    place=[r"put_together", r"\baccumulate\b", r"total \+ grads", r"total\[i\]", r"\btotal\b"],
    wrong=[
        r"create_graph|first.?order|second derivative.{0,20}(missing|dropped)",
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"log_rate.{0,30}(missing|wrong)",
        r"overwrit\w+.{0,40}(earlier|first)|only the last micro",
        r"(micro.?batch|rank).{0,30}(mean of means|averag)",
        r"sampler|same rows",
    ],
)
WHY = """torch.autograd.grad gives tuples, and put_together joins total and grads with +, so that
total becomes one long tuple. total[i] for the parameters then reads the first micro-batch's
gradients only; those of each rank's second micro-batch (its third task; none on the last rank with
two tasks) are lost. All parameters lack these tasks; meta-gradients and the reduction are right.
Fix: add the tensors of the tuples one by one."""
