"""A pondering classifier as a pipeline of three stages: each stage is one pondering step, says with which probability it stops here and answers with the shared classifier. The loss is the expected loss over the stopping step. Between
stages go the hidden state and the probability that the row is still running; the last stage stops with all that is left. Three micro-batches of odd size (all forwards, then all backwards); shared heads are summed over the stages;
divisor: rows.

The bug: the first two stages hand on the running probability as it came in, before it is multiplied with one minus their own stopping probability. After the halting bookkeeping of PonderNet and ACT: kpot/keras-transformer issue 3
(bug in TransformerACT), where the bookkeeping of the remainder goes wrong, too.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
STAGES, INPUTS, WIDTH, CLASSES, ROWS = 3, 6, 7, 4, 11
PARTS = [(0, 3), (3, 4), (4, 11)]


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, h):
        return h + self.down(F.silu(self.up(self.norm(h))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(INPUTS, WIDTH)
        self.cells = nn.ModuleDict({str(n): Cell() for n in range(STAGES)})
        self.halt, self.answer = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, CLASSES)
        self.hand_on = None

    def ponder(self, n, h, running, label):
        """One step: new state, running probability for the next step, expected loss."""
        h = self.cells[str(n)](h)
        loss = F.cross_entropy(self.answer(h), label, reduction="none")
        if n == STAGES - 1:
            return h, running, (running * loss).sum()
        stop = torch.sigmoid(self.halt(h)).squeeze(-1)
        return h, running * (1 - stop), (running * stop * loss).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        h = model.enter(rows["x"])
        running, total = torch.ones_like(h[:, 0]), 0.0
        for n in range(STAGES):
            h, running, loss = model.ponder(n, h, running, rows["label"])
            total = total + loss
        return total, len(rows["label"])

    def distribute(self, model, ctx):
        for n in range(STAGES):
            if n != ctx.rank:
                del model.cells[str(n)]
        if ctx.rank:
            model.enter = None
        return model

    def message(self, h, came, left):
        """What the next stage gets: the state and the running probability."""
        return torch.cat([h, left[:, None]], 1)

    def step(self, model, batch, ctx):
        model.zero_grad(set_to_none=True)
        stage, last, done = ctx.rank, ctx.rank == STAGES - 1, []
        for low, high in PARTS:
            if stage == 0:
                got = None
                h = model.enter(batch["x"][low:high])
                running = torch.ones_like(h[:, 0])
            else:
                kind = next(model.parameters()).dtype
                got = torch.empty(high - low, WIDTH + 1, dtype=kind)
                dist.recv(got, stage - 1)
                got.requires_grad_()
                h, running = got[:, :WIDTH], got[:, WIDTH]
            h, left, loss = model.ponder(stage, h, running, batch["label"][low:high])
            sent = None if last else self.message(h, running, left)
            if not last:
                dist.send(sent.detach().contiguous(), stage + 1)
            done.append((got, sent, loss / ROWS))
        for got, sent, loss in done:
            if last:
                loss.backward()
            else:
                back = torch.empty_like(sent)
                dist.recv(back, stage + 1)
                torch.autograd.backward([loss, sent], [torch.ones_like(loss), back])
            if got is not None:
                dist.send(got.grad.contiguous(), stage - 1)
        for p in (*model.halt.parameters(), *model.answer.parameters()):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)


class Buggy(Clean):
    def message(self, h, came, left):
        return torch.cat([h, came[:, None]], 1)


EXPECT = dict(
    right=[
        r"(?i)loss|running|message|stage|halt|rank|weight|sent|received|hand",
        r"(?i)(rank|stage)s? (0|1|2)|ranks 1|last stage|later stage|behind the first|stages? behind|hand|sent|receiv|message",
        r"(?i)loss|weight|coefficient|factor|running|probab|value|received|stale|halt",
    ],
    place=[r"(?i)loss|halt|running|message|stage|received|sent|rank 1|rank 2"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the (last|first) micro.?batch|other micro.?batch",
        r"(?i)(cells|norm|up|down|enter)\S* .{0,25}forward.{0,20}wrong|forward goes wrong (first )?(at|in) (the )?(enter|cells|answer)",
        r"(?i)labels? .{0,20}(is|are) wrong|recomput|dropout",
    ],
)
WHY = (
    "Stages 0 and 1 send (h, running as it came in) instead of (h, running * (1 - stop)). The hidden states and answers are right everywhere; the running probability that stages 1 and 2 receive is 1 for all rows. So stage 1's part of "
    "the loss is weighted with stop_1 instead of (1 - stop_0) stop_1 and stage 2's with 1 instead of (1 - stop_0)(1 - stop_1): row by row too large. And the gradient that goes back through the running probability never reaches halt in "
    "stages 0 and 1 (it goes to the received value, on stage 0 to a constant). Wrong for all rows and micro-batches: answer, halt, all cells, enter. The own loss of stage 0 is right. Order of messages, sum of the heads, divisor 11 "
    "right. Fix: send left."
)
