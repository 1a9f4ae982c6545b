"""A pipeline of three stages by hand, GPipe with three micro-batches: every stage sends its output on and keeps it for the backward, where the gradient comes from the next stage. The hidden states that leave a stage pay a small penalty
on their size (the activation regularisation of AWD-LSTM), whose backward is run along with that of the stage.

The bug: to save memory, the output is released once it is sent, as in Megatron's deallocate_output_tensor (its data replaced by a single element, the graph kept). The penalty has saved this output for its backward, which now meets
the placeholder: the penalty has no gradient any more. After Megatron's warning that nothing but the send may use the tensor, and reports on auxiliary losses at stage borders.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, FEATURES, WIDTH, TARGETS, MICRO = 11, 5, 7, 3, 3
ALPHA = 0.2


class Stage(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.inp = nn.Linear(FEATURES if first else WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 10), nn.GELU(), nn.Linear(10, WIDTH))

    def forward(self, x):
        x = self.inp(x)
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(Stage(n == 0) for n in range(3))
        self.head = nn.Linear(WIDTH, TARGETS)


def backward_of_outputs(outputs, grads):
    """The engine itself: torch.autograd.backward looks at the shapes of the outputs first."""
    Variable._execution_engine.run_backward(
        tensors=tuple(outputs),
        grad_tensors=tuple(grads),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FEATURES, generator=g),
            "y": torch.randn(ROWS, TARGETS, generator=g),
        }

    def loss_sum(self, model, rows):
        h, penalty = rows["x"], 0.0
        for n, stage in enumerate(model.stages):
            h = stage(h)
            if n < 2:
                penalty = penalty + ALPHA * h.square().sum()
        return (model.head(h) - rows["y"]).square().sum() + penalty, len(rows["x"])

    def send_forward(self, output, ctx):
        dist.send(output.detach().contiguous(), ctx.rank + 1)

    def step(self, model, batch, ctx):
        stage, last = model.stages[ctx.rank], ctx.rank == ctx.world_size - 1
        model.zero_grad()
        kept = []
        for n in range(MICRO):
            x, y = (batch[k].tensor_split(MICRO)[n] for k in ("x", "y"))
            if ctx.rank > 0:
                x = torch.empty(len(y), WIDTH, dtype=y.dtype)
                dist.recv(x, ctx.rank - 1)
                x.requires_grad_()
            output = stage(x)
            if last:
                loss = (model.head(output) - y).square().sum() / ROWS
                kept.append((x, None, loss, len(y)))
            else:
                penalty = ALPHA * output.square().sum() / ROWS
                self.send_forward(output, ctx)
                kept.append((x, output, penalty, len(y)))
        for x, output, loss, rows in kept:
            one = torch.ones_like(loss)
            if last:
                backward_of_outputs([loss], [one])
            else:
                grad = torch.empty(rows, WIDTH, dtype=loss.dtype)
                dist.recv(grad, ctx.rank + 1)
                backward_of_outputs([output, loss], [grad, one])
            if ctx.rank > 0:
                dist.send(x.grad.contiguous(), ctx.rank - 1)
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=ctx.group("pp"))


class Buggy(Clean):
    def send_forward(self, output, ctx):
        dist.send(output.detach().contiguous(), ctx.rank + 1)
        output.data = output.data.new_zeros(1)


EXPECT = dict(
    right=[
        r"penalty|output|saved|regulari|square|hidden",
        r"releas|freed|deallocat|placeholder|overwrit|replac|\.data|chang|modif|in.?place|emptied|zero|saved.{0,40}(tensor|value)|(gradient|contribution|term).{0,60}(lost|missing|dropped|absent|never|nothing)|contributes? (nothing|no)|no gradient",
    ],
    place=[r"send_forward", r"output\.data|new_zeros", r"penalty", r"output|square"],
    wrong=[
        r"missing (all.?)?reduc|not reduced|reduced (twice|again)|wrong group",
        r"micro.?batch.{0,30}(lost|dropped|overwritten|swapped)|divisor|mean of means|row count",
        r"(received|sent) .{0,30}(wrong|other) (micro|rank|stage)|wrong micro.?batch|receive buffer",
    ],
)
WHY = (
    "On the stages 0 and 1, send_forward replaces the output's data by one zero after sending it; penalty = ALPHA * sum of output^2 has saved that very tensor, and its backward 2 * ALPHA * output yields zeros of the right shape (by broadcasting). The gradient that comes from "
    "the next stage is right, so the parameters of the first two stages lack what the penalty gives them, in all three micro-batches; stage 2's and the head's are right. Values, counts and reductions are right. A right cause says that "
    "the penalty's gradient is lost/zero because the output it needs was released or changed before the backward, in send_forward. Fix: keep the output (or give the penalty a copy)."
)
