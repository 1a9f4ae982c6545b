"""Video classification with temporal shift modules (TSM): a quarter of the channels comes from the next frame, a quarter from the previous one, the rest stays. The frames of each clip are cut over three ranks (4,
3 and 3); the border frames' channels are exchanged with the neighbours by send/recv in a custom autograd Function. Each rank scores its frames, the clip's logits are the sum over its frames. Two micro-batches.

The bug: in the backward the exchange at the borders is that of the forward, applied to the gradient: the gradient of the first frame's "next" channels is sent to the previous rank and that of the last frame's
"previous" channels to the next rank, although the shift's adjoint runs the other way (the interior is right). After halo/shift exchanges whose backward was copied from the forward (spatial- and sequence-parallel ports).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"time": 3}}}}
ROWS, FRAMES, FEATURES, WIDTH, FOLD, CLASSES = 5, 10, 6, 8, 2, 5


def shift_inside(x):
    out = torch.zeros_like(x)
    out[:, :-1, :FOLD] = x[:, 1:, :FOLD]
    out[:, 1:, FOLD : 2 * FOLD] = x[:, :-1, FOLD : 2 * FOLD]
    out[:, :, 2 * FOLD :] = x[:, :, 2 * FOLD :]
    return out


def shift_inside_adjoint(grad):
    out = torch.zeros_like(grad)
    out[:, 1:, :FOLD] = grad[:, :-1, :FOLD]
    out[:, :-1, FOLD : 2 * FOLD] = grad[:, 1:, FOLD : 2 * FOLD]
    out[:, :, 2 * FOLD :] = grad[:, :, 2 * FOLD :]
    return out


def exchange(to_previous, to_next, ctx):
    """Hands a slab to either neighbour, returns what they handed over (zeros at the ends of the clip)."""
    ranks = dist.get_process_group_ranks(ctx.group("time"))
    me, size = ctx.coords["time"], ctx.axes["time"]
    from_previous, from_next = torch.zeros_like(to_next), torch.zeros_like(to_previous)
    ops = []
    if me > 0:
        ops.append(dist.P2POp(dist.isend, to_previous.contiguous(), ranks[me - 1]))
        ops.append(dist.P2POp(dist.irecv, from_previous, ranks[me - 1]))
    if me < size - 1:
        ops.append(dist.P2POp(dist.isend, to_next.contiguous(), ranks[me + 1]))
        ops.append(dist.P2POp(dist.irecv, from_next, ranks[me + 1]))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return from_previous, from_next


class ShiftAcrossRanks(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, ctx):
        fctx.ctx = ctx
        out = shift_inside(x)
        from_previous, from_next = exchange(x[:, 0, :FOLD], x[:, -1, FOLD : 2 * FOLD], ctx)
        out[:, -1, :FOLD] = from_next
        out[:, 0, FOLD : 2 * FOLD] = from_previous
        return out

    @staticmethod
    def backward(fctx, grad):
        out = shift_inside_adjoint(grad)
        from_previous, from_next = exchange(
            grad[:, 0, FOLD : 2 * FOLD], grad[:, -1, :FOLD], fctx.ctx
        )
        out[:, 0, :FOLD] = from_previous
        out[:, -1, FOLD : 2 * FOLD] = from_next
        return out, None


class TemporalShift(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, ctx):
        return ShiftAcrossRanks.forward(fctx, x, ctx)

    @staticmethod
    def backward(fctx, grad):
        out = shift_inside_adjoint(grad)
        from_previous, from_next = exchange(
            grad[:, 0, :FOLD], grad[:, -1, FOLD : 2 * FOLD], fctx.ctx
        )
        out[:, -1, FOLD : 2 * FOLD] = from_next
        out[:, 0, :FOLD] = from_previous
        return out, None


class Video(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, frames, shift):
        x = self.stem(frames)
        for block in self.blocks:
            x = x + block(shift(x))
        return torch.tanh(self.head(x)).sum(1)


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Video()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "frames": torch.randn(ROWS, FRAMES, FEATURES, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["frames"], shift_inside)
        return F.cross_entropy(logits, rows["label"], reduction="sum"), len(logits)

    def shift(self, x, ctx):
        return ShiftAcrossRanks.apply(x, ctx)

    def step(self, model, batch, ctx):
        group = ctx.group("time")
        for p in model.parameters():
            p.grad = None
        for frames, label in zip(batch["frames"].tensor_split(2), batch["label"].tensor_split(2)):
            own = frames.tensor_split(ctx.axes["time"], dim=1)[ctx.coords["time"]]
            logits = SumOverRanks.apply(model(own, lambda x: self.shift(x, ctx)), group)
            (F.cross_entropy(logits, label, reduction="sum") / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def shift(self, x, ctx):
        return TemporalShift.apply(x, ctx)


EXPECT = dict(
    right=[
        r"backward|gradient|adjoint|way back|transpose",
        r"exchange|border|bound|halo|neighbou?r|send|recv|shift|edge|previous|next|first frame|last frame|TemporalShift",
    ],
    place=[
        r"TemporalShift",
        r"exchange",
        r"\bshift\b",
        r"border|boundary|halo|first frame|last frame",
        r"isend|irecv|send|recv",
    ],
    wrong=[
        r"forward.{0,40}(is|values?) wrong|loss is wrong",
        r"parameters?.{0,30}(not|never) reduced|reduced twice|missing all.?reduce",
        r"SumOverRanks.{0,50}(wrong|missing)|counted (three|3) times",
        r"divisor|denominator|micro.?batch(es)? .{0,30}(lost|dropped)",
    ],
)
WHY = (
    "TemporalShift.backward sends grad[:, 0, :FOLD] to the previous and grad[:, -1, FOLD:2*FOLD] to the next rank as the forward does with x, where the adjoint sends grad[:, 0, FOLD:2*FOLD] to the previous (whose last frame it came from) and "
    "grad[:, -1, :FOLD] to the next. So at the borders between ranks the gradients of the wrong channels arrive, on all three ranks and in both micro-batches; forward and loss are right, as is the shift inside of a rank. "
    "A right cause says that the backward of the border exchange of the shift is wrong (runs as the forward). Fix: exchange the gradient of what was received, in the opposite direction."
)
