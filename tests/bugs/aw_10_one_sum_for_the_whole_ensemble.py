"""Critic update with an ensemble of four critics (REDQ style) on a shared encoder, data parallel 3, two or three micro-batches of transitions per rank. The gradients of a micro-batch are taken with torch.autograd.grad and added to sums
of the learner's own, one per parameter, which are then reduced and put into .grad. All critics have the same shapes, so the sums of the critics are made once per shape: a list with one entry per critic.

The bug: the list is made as [torch.zeros_like(p)] * CRITICS, so its entries are one and the same tensor, and every critic gets the sum of the gradients of all critics. The usual trap of lists of one buffer; tensors that unexpectedly
share memory as in StanislavNikolov's tinygrad/tinygrad issue 10640 (one tensor written, another changes).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
STATE, ACTION, WIDTH, CRITICS = 4, 2, 6, 4
PARTS = [[(0, 3), (3, 5)], [(5, 6), (6, 8), (8, 11)], [(11, 13), (13, 14)]]
ROWS = 14


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(STATE + ACTION, WIDTH), nn.LayerNorm(WIDTH))
        self.critics = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 5), nn.SiLU(), nn.Linear(5, 1)) for _ in range(CRITICS)
        )

    def forward(self, state, action):
        x = F.silu(self.encoder(torch.cat([state, action], 1)))
        return torch.cat([critic(x) for critic in self.critics], 1)


class Clean:
    own_sums = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "state": torch.randn(ROWS, STATE, generator=g),
            "action": torch.randn(ROWS, ACTION, generator=g),
            "target": torch.randn(ROWS, generator=g) * 2,
        }

    def loss_sum(self, model, rows):
        value = model(rows["state"], rows["action"])
        return (value - rows["target"][:, None]).square().sum(), len(rows["target"])

    def step(self, model, batch, ctx):
        encoder = list(model.encoder.parameters())
        critics = [list(critic.parameters()) for critic in model.critics]
        sums = [torch.zeros_like(p) for p in encoder]
        if self.own_sums:
            lists = [[torch.zeros_like(p) for _ in range(CRITICS)] for p in critics[0]]
        else:
            lists = [[torch.zeros_like(p)] * CRITICS for p in critics[0]]
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            loss = self.loss_sum(model, rows)[0] / ROWS
            every = encoder + [p for critic in critics for p in critic]
            grads = iter(torch.autograd.grad(loss, every))
            for total in sums:
                total.add_(next(grads))
            for number in range(CRITICS):
                for entries in lists:
                    entries[number].add_(next(grads))
        for p, total in zip(encoder, sums, strict=True):
            dist.all_reduce(total, group=ctx.group("dp"))
            p.grad = total
        for place, entries in enumerate(lists):
            stacked = torch.stack(entries)
            dist.all_reduce(stacked, group=ctx.group("dp"))
            for number in range(CRITICS):
                critics[number][place].grad = stacked[number].clone()


class Buggy(Clean):
    own_sums = False


EXPECT = dict(
    right=[
        r"(?i)critics",
        r"(?i)sum|add|accumul|share|same (tensor|buffer|memory|storage|gradient)|alias"
        r"|other parameter|each other|one another|all (four )?critics|together",
        r"(?i)critics.{0,200}(other|all|each|share|same|sum|together|one another|equal|alike)"
        r"|(other|all|each|share|same|sum|alias|together|equal).{0,200}critics",
    ],
    place=[r"(?i)critics"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced (twice|again|four times)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[2345]\b",
        r"(?i)(?<!not )(?<!nor )forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"(?i)only (on )?rank [012]\b|encoder\S* (is|are) wrong",
        r"(?i)other rows|wrong rows|targets? .{0,20}wrong",
    ],
)
WHY = (
    "The four entries of each of the learner's lists are one tensor, so the gradients of all four critics (over all micro-batches) are added to it, and after stack and all-reduce each critic's parameter gets the sum over the four "
    "critics of the gradients of the parameters of the same place: critics.0-3 have equal gradients for .0.weight, "
    ".0.bias, .2.weight, .2.bias. On all three ranks alike, all micro-batches and rows. Forward, loss and what autograd gives are right, the encoder's gradients are right, divisor 14 and the reduction are right; it goes wrong in "
    "the accumulation in the step, before the reduction. Fix: [torch.zeros_like(p) for _ in range(CRITICS)]."
)
