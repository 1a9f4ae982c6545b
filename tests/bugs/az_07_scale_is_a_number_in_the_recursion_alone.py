"""A hidden Markov model with learnt tables, cut in time over three ranks (four, three and two of nine words): the forward recursion's state probabilities go from rank to rank, their gradient comes back. After every word the probabilities
are divided by their sum c, and the log-likelihood is the sum of log c, each rank's part of it on that rank. Two micro-batches; the parameter gradients are summed.

The bug: the division uses c.detach() ("the scale is only for stability"), but log c is the likelihood itself and keeps its graph. A scale may be a number in both places or in none. Compare the discussion of the scaling factors in
hmmlearn/hmmlearn PR 426 and amaas/stanford-ctc issue 8 (normalization at each time step).
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"time": 3}}}}
ROWS, WORDS, VOCABULARY, STATES = 5, 9, 6, 4
SECTIONS = [4, 3, 2]
PARTS = [slice(0, 3), slice(3, 5)]


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.states = nn.Parameter(torch.randn(STATES, 5))
        self.emit, self.move = nn.Linear(5, VOCABULARY), nn.Linear(5, STATES)
        self.start = nn.Parameter(torch.randn(STATES))
        self.as_number = False

    def forward(self, words, alpha=None):
        """log-likelihood of the words (rows) and the state probabilities behind them"""
        emission = torch.softmax(self.emit(self.states), 1)
        moves = torch.softmax(self.move(self.states), 1)
        total = 0
        for word in words.t():
            alpha = torch.softmax(self.start, 0) if alpha is None else alpha @ moves
            alpha = alpha * emission[:, word].t()
            scale = alpha.sum(1, keepdim=True)
            total = total + scale[:, 0].log()
            alpha = alpha / (scale.detach() if self.as_number else scale)
        return total, alpha


class Clean:
    as_number = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Chain()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {"words": torch.randint(VOCABULARY, (ROWS, WORDS), generator=g)}

    def loss_sum(self, model, rows):
        return -model(rows["words"])[0].sum(), len(rows["words"])

    def distribute(self, model, ctx):
        model.as_number = self.as_number
        return model

    def step(self, model, batch, ctx):
        rank, last = ctx.rank, ctx.world_size - 1
        first = sum(SECTIONS[:rank])
        own = slice(first, first + SECTIONS[rank])
        for part in PARTS:
            words, alpha = batch["words"][part, own], None
            if rank:
                alpha = torch.empty(len(words), STATES, dtype=model.start.dtype)
                dist.recv(alpha, rank - 1)
                alpha.requires_grad_()
            total, after = model(words, alpha)
            ends, grads = [-total.sum() / ROWS], [None]
            if rank < last:
                dist.send(after.detach().contiguous(), rank + 1)
                grads.append(torch.empty_like(after))
                dist.recv(grads[-1], rank + 1)
                ends.append(after)
            torch.autograd.backward(ends, grads)
            if rank:
                dist.send(alpha.grad.contiguous(), rank - 1)
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=ctx.group("time"))


class Buggy(Clean):
    as_number = True


EXPECT = dict(
    right=[
        r"(?i)detach|graph|backward|gradient|autograd|no_grad|constant",
        r"(?i)scale|normali[sz]|detach|sum of the (state )?prob|division|recursion|alpha|"
        r"state prob|c\b",
        r"(?i)detach|constant|number|cut|missing|lost|without (a )?gradient|"
        r"not (back)?propagat|backward",
    ],
    place=[r"(?i)scale|normali[sz]|alpha|recursion|forward of (the )?chain|state prob|detach"],
    wrong=[
        r"(?i)(forward|loss|value)s? (is|are|goes|go) wrong|goes wrong in the forward",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own number|"
        r"factor of (1/)?[0-9]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)(sent|received|transported?|handed|comes) .{0,30}(wrong rank|"
        r"of another micro|never sent|not sent back)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
    ],
)
WHY = (
    "All values are right on all ranks: state probabilities, scales and log-likelihood. Wrong is the graph: in `alpha / scale.detach()` the path through the scale is missing, while log(scale) has one. Then the gradient of each log "
    "c_t is that of the whole log-likelihood up to word t, and their sum counts word t's part 9 - t + 1 times over instead of subtracting the earlier ones: gradients of states, emit, move and start are too large and wrong in "
    "direction; the emissions of the early words weigh most (start's gradient comes from nine likelihoods instead of one). It holds on all ranks, from every word to the one before it, within the sections and, as the gradient of alpha "
    "that is sent back, across them; for all rows and both micro-batches. Sending, receiving, sum over the ranks and divisor 5 are right. Fix: divide by scale with its graph, or detach it in both places and add the log of the last "
    "sum."
)
