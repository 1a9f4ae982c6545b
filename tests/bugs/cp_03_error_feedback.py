"""A quasi-recurrent byte model (QRNN: gates from a causal convolution, then fo-pooling). Ten rows
over three ranks, three micro-batches each, and gradient compression by hand: after every micro-
batch one third of the coordinates (another third each time) is summed over the ranks, what is not
sent waits as a residual and is added to the next gradient (error feedback). The last micro-batch
sends all that is left, so that the window as a whole loses nothing.

Bug: the residual is taken after the collective, from the buffer that was sent; all_reduce works in
place, so that the buffer holds the sum of all ranks by then. After error-feedback wrappers in which
`all_reduce(sent)` was moved up to overlap with the bookkeeping.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, T, BYTES, D, H, TURNS = 10, 8, 12, 5, 7, 3


class QuasiRecurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(BYTES, D)
        self.gates = nn.Conv1d(D, 3 * H, 2)
        self.head = nn.Linear(H, BYTES)

    def forward(self, ids):
        x = F.pad(self.embed(ids).transpose(1, 2), (1, 0))
        z, f, o = self.gates(x).transpose(1, 2).chunk(3, -1)
        z, f, o = z.tanh(), f.sigmoid(), o.sigmoid()
        c, out = torch.zeros_like(z[:, 0]), []
        for t in range(ids.shape[1]):
            c = f[:, t] * c + (1 - f[:, t]) * z[:, t]
            out.append(o[:, t] * c)
        return self.head(torch.stack(out, 1))


class ErrorFeedback:
    def __init__(self, group):
        self.group, self.residual = group, 0.0

    def chosen(self, flat, turn):
        if turn == TURNS - 1:
            return torch.ones_like(flat)
        return (torch.arange(flat.numel()) % TURNS == turn).to(flat.dtype)

    def exchange(self, gradient, turn):
        waiting = gradient + self.residual
        sent = waiting * self.chosen(waiting, turn)
        self.residual = waiting - sent
        dist.all_reduce(sent, group=self.group)
        return sent


class OverlappedErrorFeedback(ErrorFeedback):
    def exchange(self, gradient, turn):
        waiting = gradient + self.residual
        sent = waiting * self.chosen(waiting, turn)
        dist.all_reduce(sent, group=self.group)
        self.residual = waiting - sent
        return sent


class Clean:
    feedback = ErrorFeedback

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 31)
        return QuasiRecurrent()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 310)
        text = torch.randint(BYTES, (ROWS, T + 1), generator=g)
        return {"ids": text[:, :-1], "next": text[:, 1:]}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"]).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["next"].flatten(), reduction="sum")
        return loss, rows["next"].numel()

    def step(self, model, batch, ctx):
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        params = list(model.parameters())
        feedback, total = self.feedback(ctx.group("dp")), 0.0
        for turn, part in enumerate(own.tensor_split(TURNS)):
            loss, _ = self.loss_sum(model, {k: v[part] for k, v in batch.items()})
            grads = torch.autograd.grad(loss / batch["next"].numel(), params)
            total = total + feedback.exchange(parameters_to_vector(grads), turn)
        for p in params:
            p.grad = torch.empty_like(p)
        vector_to_parameters(total, [p.grad for p in params])


class Buggy(Clean):
    feedback = OverlappedErrorFeedback


EXPECT = dict(
    right=[
        r"residual|error.?feedback|left.?over|remainder|carried|waiting",
        r"in.?place|after (the )?(all_?reduce|collective|sum)|already (summed|reduced)|order|"
        r"sum of (all|the) ranks|overwrit|(others?|foreign|other ranks).{0,30}(part|gradient|"
        r"subtract)|before the (all_?reduce|collective|sum)",
    ],
    place=[r"(Overlapped)?ErrorFeedback", r"\bexchange\b", r"residual", r"waiting - sent"],
    wrong=[
        r"mean of (the )?(micro|ranks)",
        r"(uneven|unequal).{0,30}rows",
        r"(gates|embed|head).{0,30}(not reduced|never reduced)",
        r"(last|first) micro.?batch.{0,20}(not|never) (sent|reduced|flush)",
        r"vector_to_parameters.{0,20}order",
    ],
)
WHY = """The residual must be what this rank has not sent: waiting - sent with `sent` as it was
before the collective. OverlappedErrorFeedback runs all_reduce(sent) first; it is in place, so the
residual at the chosen coordinates becomes -(what the other ranks sent), and the later turns send
that too: each of the first turns counts 1 - (n - 1) = -1 times in the sum over three ranks (mixed
with its own later turns). Fix: residual = waiting - sent before all_reduce, or reduce a clone."""
