"""A keyword spotter: an LSTM with peephole connections whose cell is a hand-written Function
(what a fused kernel would do), data parallel over three ranks (3, 3 and 2 of 8 rows),
micro-batches of two rows, one flat all-reduce at the end.

Bug: the cell's backward leaves out that the output gate looks at the new cell state. After
fused peephole LSTM cells in speech toolkits (haste / sru-like kernels), where the plain cell's
backward was extended by the gradients of the peephole weights.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, FRAMES, MELS, HIDDEN, WORDS = 8, 6, 4, 5, 3


def gates(z, c, peep):
    zi, zf, zg, zo = z.chunk(4, -1)
    i = torch.sigmoid(zi + peep[0] * c)
    f = torch.sigmoid(zf + peep[1] * c)
    g = torch.tanh(zg)
    new = f * c + i * g
    o = torch.sigmoid(zo + peep[2] * new)
    return i, f, g, o, new


class Cell(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, c, peep):
        i, f, g, o, new = gates(z, c, peep)
        ctx.save_for_backward(i, f, g, o, c, new, peep)
        return o * torch.tanh(new), new

    @staticmethod
    def backward(ctx, dh, dc):
        i, f, g, o, c, new, peep = ctx.saved_tensors
        t = torch.tanh(new)
        do = dh * t * o * (1 - o)
        dnew = dc + dh * o * (1 - t * t) + do * peep[2]
        di = dnew * g * i * (1 - i)
        df = dnew * c * f * (1 - f)
        dg = dnew * i * (1 - g * g)
        dpeep = torch.stack([(di * c).sum(0), (df * c).sum(0), (do * new).sum(0)])
        back = dnew * f + di * peep[0] + df * peep[1]
        return torch.cat([di, df, dg, do], -1), back, dpeep


class FusedCell(Cell):
    @staticmethod
    def backward(ctx, dh, dc):
        i, f, g, o, c, new, peep = ctx.saved_tensors
        t = torch.tanh(new)
        dnew = dc + dh * o * (1 - t * t)
        do = dh * t * o * (1 - o)
        di = dnew * g * i * (1 - i)
        df = dnew * c * f * (1 - f)
        dg = dnew * i * (1 - g * g)
        dpeep = torch.stack([(di * c).sum(0), (df * c).sum(0), (do * new).sum(0)])
        back = dnew * f + di * peep[0] + df * peep[1]
        return torch.cat([di, df, dg, do], -1), back, dpeep


class PeepholeLstm(nn.Module):
    cell = None

    def __init__(self, d_in):
        super().__init__()
        self.input = nn.Linear(d_in, 4 * HIDDEN)
        self.hidden = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.peep = nn.Parameter(0.8 * torch.randn(3, HIDDEN))

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], HIDDEN)
        out = []
        for frame in self.input(x).unbind(1):
            z = frame + self.hidden(h)
            if self.cell is None:
                _, _, _, o, c = gates(z, c, self.peep)
                h = o * torch.tanh(c)
            else:
                h, c = self.cell.apply(z, c, self.peep)
            out.append(h)
        return torch.stack(out, 1)


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Linear(MELS, MELS)
        self.lstm = PeepholeLstm(MELS)
        self.words = nn.Linear(HIDDEN, WORDS)

    def forward(self, mels):
        return self.words(self.lstm(torch.tanh(self.front(mels))).mean(1))


class Clean:
    cell = Cell

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 21)
        return Spotter()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 210)
        return {
            "mels": torch.randn(ROWS, FRAMES, MELS, generator=g),
            "word": torch.randint(0, WORDS, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        loss = F.cross_entropy(model(rows["mels"]), rows["word"], reduction="sum")
        return loss, rows["word"].shape[0]

    def distribute(self, model, ctx):
        model.lstm.cell = self.cell
        return model

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        own = torch.arange(ROWS).tensor_split(dist.get_world_size(group))[dist.get_rank(group)]
        for part in own.split(2):
            loss, _ = self.loss_sum(model, {k: v[part] for k, v in batch.items()})
            (loss / ROWS).backward()
        params = list(model.parameters())
        flat = torch.cat([p.grad.flatten() for p in params])
        dist.all_reduce(flat, group=group)
        for p, g in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.grad.copy_(g.view_as(p))


class Buggy(Clean):
    cell = FusedCell


EXPECT = dict(
    right=[
        r"output.?gate|\bdo\b|peep\w*\[2\]|\bo gate",
        r"peep",
        (
            r"cell.?state|\bdnew\b|\bnew\b|\bc_?t\b|\bdc\b|new cell"
            r"|\bcell\b.{0,30}(grad|state)"
        ),
        (
            r"miss|omit|left out|leav|lack|forg[eo]t|drop|ignor|without|never|not (add"
            r"|includ|propag|flow)|does(n't| not)"
        ),
    ],
    place=[r"FusedCell", r"\bdnew\b", r"Cell\.backward|cell.{0,20}backward", r"PeepholeLstm|lstm"],
    wrong=[
        r"forget.?gate.{0,40}(missing|wrong|omitted)",
        r"(hidden|recurrent).{0,30}(state )?(detached|kept)",
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"flat.{0,30}(order|offset)",
        r"uneven.{0,30}rows",
    ],
)
WHY = (
    "The output gate sees the new cell state, o = sigmoid(zo + peep[2] * new), so the "
    "gradient of the new cell state has a third part, do * peep[2]. FusedCell.backward "
    "computes dnew without it. Wrong are the gradients of everything that gets dnew: the i, "
    "f, g rows of input and hidden, peep[0] and peep[1], and the front layer; within one last"
    " step the o rows and peep[2] are right, but earlier steps spoil them too through h; the "
    "words head is right. A right cause says that the output gate's peephole contribution to "
    "the cell state's gradient is missing. Fix: add do * peep[2] to dnew."
)
