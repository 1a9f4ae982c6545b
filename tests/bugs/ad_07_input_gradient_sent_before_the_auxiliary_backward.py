"""Deep supervision in a hand-written pipeline of three stages (pp 3), four uneven micro-batches: as in Inception/GoogLeNet and PSPNet an auxiliary classifier hangs on the middle stage's output, with the weight 0.4, beside the classifier of the
last stage.

The bug: the middle stage runs two backwards, first from the gradient that comes from the next stage, then from its own auxiliary loss; to overlap, it sends its input's gradient to the first stage right after the first of the two. The second
adds to the same .grad, which has left by then. A mistake of own pipelines with several losses (the schedule sends when "the" backward is done); compare Megatron-LM's and PipeDream's send after a single backward_step.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, INPUT, WIDTH, CLASSES, MICRO, AUX = 13, 5, 8, 6, 4, 0.4


class Layer(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.linear, self.norm = nn.Linear(inputs, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return F.gelu(self.norm(self.linear(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stage0 = nn.Sequential(Layer(INPUT), Layer(WIDTH))
        self.stage1 = nn.Sequential(Layer(WIDTH), Layer(WIDTH))
        self.aux = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
        self.stage2 = nn.Sequential(Layer(WIDTH), nn.Linear(WIDTH, CLASSES))

    def forward(self, x):
        h = self.stage1(self.stage0(x))
        return self.stage2(h), self.aux(h)


class Clean:
    one_backward = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUT, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        main, aux = model(rows["x"])
        loss = F.cross_entropy(main, rows["y"], reduction="sum") + AUX * F.cross_entropy(
            aux, rows["y"], reduction="sum"
        )
        return loss, len(rows["y"])

    def distribute(self, model, ctx):
        for name in [
            ("stage1", "aux", "stage2"),
            ("stage0", "stage2"),
            ("stage0", "stage1", "aux"),
        ][ctx.rank]:
            delattr(model, name)
        return model

    def receive(self, like, rows, source):
        x = like.new_empty(rows, WIDTH)
        dist.recv(x, source)
        return x

    def middle_backward(self, x, h, aux_loss, grad):
        if self.one_backward:
            torch.autograd.backward([h, aux_loss], [grad, None])
            dist.send(x.grad, 0)
        else:
            torch.autograd.backward(h, grad, retain_graph=True)
            dist.send(x.grad, 0)
            aux_loss.backward()

    def step(self, model, batch, ctx):
        x, y, rank = batch["x"], batch["y"], ctx.rank
        parts, kept = torch.arange(ROWS).tensor_split(MICRO), []
        for part in parts:
            if rank == 0:
                out = model.stage0(x[part])
                dist.send(out.detach(), 1)
                kept.append(out)
            elif rank == 1:
                inp = self.receive(x, len(part), 0).requires_grad_()
                h = model.stage1(inp)
                dist.send(h.detach(), 2)
                kept.append(
                    (inp, h, AUX * F.cross_entropy(model.aux(h), y[part], reduction="sum") / ROWS)
                )
            else:
                inp = self.receive(x, len(part), 1).requires_grad_()
                kept.append(
                    (inp, F.cross_entropy(model.stage2(inp), y[part], reduction="sum") / ROWS)
                )
        for part, k in zip(parts, kept):
            if rank == 2:
                k[1].backward()
                dist.send(k[0].grad, 1)
            elif rank == 1:
                self.middle_backward(*k, self.receive(x, len(part), 2))
            else:
                k.backward(self.receive(x, len(part), 1))


class Buggy(Clean):
    one_backward = False


EXPECT = dict(
    right=[
        r"(?i)stage0|first stage|rank 0|stage 0",
        r"(?i)aux|second (loss|backward|head|classifier)|part of (its|the|their) gradient|one of (the )?two|contribution|incomplete|too early|already sent",
    ],
    place=[r"(?i)stage0|first stage|rank 0\b|stage 0|between .{0,20}(rank|stage)s? 0 and 1|aux"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(aux\.\d|stage1\.\d\S*|stage2\.\d\S*)\.(weight|bias) (is|are) wrong",
        r"(?i)(never|not) (been )?all.?reduced|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[34]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten|of another)",
        r"(?i)rows? .{0,20}(never read|read twice|dropped)",
        r"(?i)main (loss|head|classifier) .{0,20}(lost|missing|dropped)",
    ],
)
WHY = (
    "Stage 0 (rank 0) gets the gradient of the main loss only: the middle stage sends its input's gradient after the backward from the next stage's gradient and before that of the auxiliary loss. All parameters of stage0 (both layers, "
    "linear and norm) lack the whole contribution of the auxiliary classifier (0.4 times its cross entropy), in all four micro-batches and all 13 rows: right for the main loss with coefficient 1, zero for the auxiliary one. stage1 and aux on "
    "rank 1 have both contributions and are right, stage2 on rank 2 is right. Forward, divisor, order of micro-batches, what rank 2 sends are right. Fix: one backward from [h, aux_loss], or send after both."
)
