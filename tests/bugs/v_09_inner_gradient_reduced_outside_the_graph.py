"""Meta-learning (MAML, one inner step with its second-order term): tasks over two data ranks, and the shots and queries of each task cut over two ranks more, whose inner gradients are summed.
After the forum threads on MAML with distributed training, where the inner gradient has to be reduced within the graph.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "shots": 2}}}}
TASKS, SHOTS, QUERIES, FEATURES, CLASSES, RATE = 5, 7, 5, 6, 4, 0.4


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(FEATURES, 9), nn.LayerNorm(9)
        self.mid, self.head = nn.Linear(9, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.mid(torch.tanh(self.norm(self.up(x))))))


class SumInGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Learner()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "shots": torch.randn(TASKS, SHOTS, FEATURES, generator=g),
            "shot_labels": torch.randint(CLASSES, (TASKS, SHOTS), generator=g),
            "queries": torch.randn(TASKS, QUERIES, FEATURES, generator=g),
            "query_labels": torch.randint(CLASSES, (TASKS, QUERIES), generator=g),
        }

    @staticmethod
    def task_loss(model, task, reduce):
        """Sum over the queries, after one step on the mean over all shots."""
        shots, shot_labels, queries, query_labels = task
        with torch.enable_grad():
            weights = dict(model.named_parameters())
            inner = F.cross_entropy(model(shots), shot_labels, reduction="sum") / SHOTS
            grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            moved = {
                name: p - RATE * reduce(g)
                for (name, p), g in zip(weights.items(), grads, strict=True)
            }
            logits = functional_call(model, moved, (queries,))
            return F.cross_entropy(logits, query_labels, reduction="sum")

    def loss_sum(self, model, rows):
        tasks = zip(*(rows[k] for k in self.batch()), strict=True)
        loss = sum(self.task_loss(model, task, lambda g: g) for task in tasks)
        return loss, rows["query_labels"].numel()

    def inner_sum(self, grad, group):
        return SumInGraph.apply(grad, group)

    def step(self, model, batch, ctx):
        group, n, i = ctx.group("shots"), ctx.axes["shots"], ctx.coords["shots"]
        mine = [v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for v in batch.values()]
        mine = [v.tensor_split(n, 1)[i] for v in mine]
        loss = sum(
            self.task_loss(model, task, lambda g: self.inner_sum(g, group))
            for task in zip(*mine, strict=True)
        )
        (loss / batch["query_labels"].numel()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def inner_sum(self, grad, group):
        total = grad.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return grad + (total - grad.detach())  # own part keeps its graph


EXPECT = dict(
    right=[
        r"shots|inner|second.?order|all.?reduce|sum over|collective|detach|task_loss|v_09\S*:\d+",
        r"backward|graph|autograd|detach|adjoint|differentia|missing|lacks?|lost|other ranks?|own (part|shots)|only (its|the|their) own",
    ],
    place=[r"shots|all.?reduce|inner|task_loss|inner_sum|v_09\S*:\d+|up|mid|head"],
    wrong=[
        r"forward (is|goes|was) wrong|goes wrong in the forward",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"(own|local) (count|denominator|divisor)",
        r"(never|not) (been )?(all.?)?(reduced|summed) (over|across) (the )?\W?(dp|data|world)",
        r"do(es)? not read every row once|rows? .{0,20}(never|twice) read",
        r"gradient of other targets",
        r"backward of \S*(up|norm|mid|head)\S* is wrong",
    ],
)
WHY = (
    "The inner gradient is summed over the two ranks of a task on a detached copy, so the moved weights are right, but the graph only has the rank's own part: its own queries' gradient goes back through the second-order term of its own shots alone. "
    "What the queries of one rank owe to the shots of the other is lost (the sum's backward, an all-reduce over 'shots', is missing). All parameters are wrong on all ranks alike, in the second-order part only; "
    "forward, loss, divisor, the last reduction and the first-order part are right."
)
