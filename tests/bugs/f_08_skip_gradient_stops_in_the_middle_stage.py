"""A U-Net in a hand-written pipeline of three stages: the skip tensor of the first stage passes through the second untouched and
is used in the third. After torchgpipe's `skippable` / torch.distributed.pipelining's reports on skip connections and FAULTS
C12-04's family (gradients dropped at a stage): the middle stage sends back what autograd left in `skip.grad`, and
that is nothing.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, LENGTH, INPUTS, WIDTH, MICRO_BATCHES = 8, 10, 3, 5, 3


class Down(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(INPUTS, WIDTH, 3, padding=1)
        self.norm = nn.GroupNorm(1, WIDTH)
        self.shrink = nn.Conv1d(WIDTH, WIDTH + 2, 2, stride=2)

    def forward(self, x):
        skip = F.gelu(self.norm(self.first(x)))
        return self.shrink(skip), skip


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH + 2, WIDTH + 2, 3, padding=1)
        self.norm = nn.GroupNorm(1, WIDTH + 2)

    def forward(self, h):
        return h + F.gelu(self.conv(self.norm(h)))


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.grow = nn.ConvTranspose1d(WIDTH + 2, WIDTH, 2, stride=2)
        self.join = nn.Conv1d(2 * WIDTH, WIDTH, 3, padding=1)
        self.out = nn.Conv1d(WIDTH, INPUTS, 1)

    def forward(self, h, skip):
        return self.out(F.gelu(self.join(torch.cat([self.grow(h), skip], dim=1))))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.middle, self.up = Down(), Middle(), Up()

    def forward(self, x):
        h, skip = self.down(x)
        return self.up(self.middle(h), skip)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return UNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "noisy": torch.randn(ROWS, INPUTS, LENGTH, generator=g),
            "noise": torch.randn(ROWS, INPUTS, LENGTH, generator=g),
            "weight": torch.rand(ROWS, generator=g) + 0.3,
        }

    @staticmethod
    def noise_loss(guess, rows):
        return ((guess - rows["noise"]).abs().mean((1, 2)) * rows["weight"]).sum()

    def loss_sum(self, model, rows):
        return self.noise_loss(model(rows["noisy"]), rows), len(rows["noise"])

    def distribute(self, model, ctx):
        for i, name in enumerate(("down", "middle", "up")):
            if i != ctx.rank:
                delattr(model, name)
        return model

    def skip_back(self, skip, received):
        """The skip does not enter the middle stage's graph: its gradient is what came from behind."""
        return received

    def step(self, model, batch, ctx):
        micros = [
            {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in batch.items()}
            for i in range(MICRO_BATCHES)
        ]

        def receive(rows, source):
            h = torch.empty(rows, WIDTH + 2, LENGTH // 2, dtype=ctx.dtype)
            skip = torch.empty(rows, WIDTH, LENGTH, dtype=ctx.dtype)
            dist.recv(h, source)
            dist.recv(skip, source)
            return h.requires_grad_(), skip.requires_grad_()

        def send(h, skip, target):
            dist.send(h.detach().contiguous(), target)
            dist.send(skip.detach().contiguous(), target)

        held = []
        for rows in micros:
            if ctx.rank == 0:
                h, skip = model.down(rows["noisy"])
                send(h, skip, 1)
                held.append((h, skip))
            elif ctx.rank == 1:
                h, skip = receive(len(rows["noise"]), 0)
                out = model.middle(h)
                send(out, skip, 2)
                held.append((h, skip, out))
            else:
                h, skip = receive(len(rows["noise"]), 1)
                held.append((h, skip, self.noise_loss(model.up(h, skip), rows) / ROWS))
        for rows in micros:
            size = len(rows["noise"])
            if ctx.rank == 2:
                h, skip, loss = held.pop(0)
                loss.backward()
                send(h.grad, skip.grad, 1)
            elif ctx.rank == 1:
                h, skip, out = held.pop(0)
                d_out, d_skip = (t.detach() for t in receive(size, 2))
                out.backward(d_out)
                send(h.grad, self.skip_back(skip, d_skip), 0)
            else:
                gradients = [t.detach() for t in receive(size, 1)]
                torch.autograd.backward(held.pop(0), gradients)


class Buggy(Clean):
    def skip_back(self, skip, received):
        return skip.grad if skip.grad is not None else torch.zeros_like(skip)


EXPECT = dict(
    right=[
        r"down|first stage|stage 0|rank \W?0",
        r"skip|missing|lack|lost|loses?|dropped|path|incomplete|partial|part of (the|its)|zero|not (sent|passed|receiv)|gradient (of|at|into|entering|that (comes|enters|arrives))|backward|"
        r"incoming gradient|direction|boundary|send",
    ],
    place=[r"down", r"skip", r"(first|middle|second) stage|stage [01]", r"ranks? \W?[01]\b"],
    wrong=[
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"(middle|up)\.\S* (is|are|was|were) (wrong|missing|(not|never) (reduced|summed))",
        r"down\.shrink\S* (is|are|was|were) (wrong|missing|(not|never) (reduced|summed))",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
        r"mean of (the )?(rank |ranks' )?means|never (been )?(all.?)?reduced",
    ],
)
WHY = (
    "The middle stage sends zeros for the gradient of the skip tensor (its own graph does not contain it), so down.first and down.norm on rank 0 lack the path through the skip connection, for every micro-batch; down.shrink, "
    "whose gradient comes through the middle stage, the middle and the last stage are exact, and so is the forward."
)
