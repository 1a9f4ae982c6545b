"""An acoustic model (frame classification, padded utterances) in a three-stage pipeline with the 1F1B schedule, five micro-batches, written by hand after Megatron's schedules.py / DeepSpeed's pipe engine: each stage keeps as many input slots as it has micro-batches
in flight, and receives into them (DeepSpeed: `self.pipe_buffers['inputs'][buffer_id]`; `inputs` is a leaf that requires a gradient, its .grad goes to the stage before).

The bug: the slots are allocated once and `.grad` of a slot is not cleared after it was sent. DeepSpeed's engine has the line for it (`self.pipe_buffers['inputs'][buffer_id].grad` set to None / `part_grad`), a port forgot it.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"stage": 3}}}}
STAGES, MICRO, EACH, FRAMES, BANDS, WIDTH, PHONES = 3, 5, 2, 6, 7, 10, 9
ROWS = MICRO * EACH


class Layer(nn.Module):
    """A gated causal convolution with a residual path."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(WIDTH), nn.Conv1d(WIDTH, 2 * WIDTH, 3)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.conv(F.pad(self.norm(x).mT, (2, 0)))
        return x + self.out(F.glu(y, 1).mT)


class Acoustic(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(BANDS, WIDTH), nn.Tanh(), Layer()),
                nn.Sequential(Layer(), Layer()),
                nn.Sequential(Layer(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, PHONES)),
            ]
        )

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Acoustic()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "sound": torch.randn(ROWS, FRAMES, BANDS, generator=g),
            "phone": torch.randint(PHONES, (ROWS, FRAMES), generator=g),
            "length": torch.randint(2, FRAMES + 1, (ROWS,), generator=g),
        }

    @staticmethod
    def frame_loss(logits, rows):
        valid = torch.arange(FRAMES) < rows["length"][:, None]
        return F.cross_entropy(logits[valid], rows["phone"][valid], reduction="sum"), valid.sum()

    def loss_sum(self, model, rows):
        return self.frame_loss(model(rows["sound"]), rows)

    def distribute(self, model, ctx):
        for s in range(STAGES):
            if s != ctx.rank:
                model.stages[s] = nn.Identity()
        return model

    def release(self, slot):
        slot.grad = None

    def step(self, model, batch, ctx):
        s, stage = ctx.rank, model.stages[ctx.rank]
        first, last = s == 0, s == STAGES - 1
        parts = [{k: v[m * EACH : (m + 1) * EACH] for k, v in batch.items()} for m in range(MICRO)]
        number = batch["length"].sum()
        slots = [
            torch.zeros(EACH, FRAMES, WIDTH, dtype=ctx.dtype, requires_grad=True)
            for _ in range(STAGES - s)
        ]
        outputs, sent = {}, []

        def send(x, to):
            x = x.detach().contiguous().clone()
            sent.append((x, dist.isend(x, to)))

        def forward(m):
            if first:
                x = parts[m]["sound"]
            else:
                x = slots[m % len(slots)]
                dist.recv(x.data, s - 1)
            y = stage(x)
            if last:
                y = self.frame_loss(y, parts[m])[0] / number
            else:
                send(y, s + 1)
            outputs[m] = y

        def backward(m):
            y = outputs.pop(m)
            if last:
                y.backward()
            else:
                g = torch.empty_like(y)
                dist.recv(g, s + 1)
                y.backward(g)
            if not first:
                slot = slots[m % len(slots)]
                send(slot.grad, s - 1)
                self.release(slot)

        ahead = STAGES - 1 - s
        for m in range(ahead):
            forward(m)
        for m in range(MICRO):
            if m + ahead < MICRO:
                forward(m + ahead)
            backward(m)
        for _, work in sent:
            work.wait()


class Buggy(Clean):
    def release(self, slot):
        pass


EXPECT = dict(
    right=[
        r"(?i)stage|pipeline|rank 0|ranks? 0|hand.?over|sent|send|activation gradient|input gradient|upstream|boundary",
        r"(?i)accumul|earlier|previous|former|cleared|zeroed|reset|stale|kept|keeps|left over|cumulativ|adds? up|sum of|also of|other micro.?batch|another micro.?batch|too large|too often|several|more than once|gradient (that|which|from|of)|differ|wrong",
    ],
    place=[r"(?i)stage|hand.?over|boundary|slot|buffer|input gradient|sent|micro.?batch|backward"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward|loss is wrong",
        r"(?i)stages\.2\S*(weight|bias) (is|are) wrong|last stage'?s? (parameters|gradients?) (is|are) wrong|rank 2'?s? (parameters|gradients?) (is|are) wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"(?i)wrong divisor|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch\S* .{0,20}(lost|dropped|never read)",
    ],
)
WHY = (
    "The .grad of a stage's input slot is not cleared after it was sent, so the next micro-batch in that slot adds to it. Stage 2 has one slot: for micro-batch m it sends the sum of the input gradients of micro-batches 0..m to stage 1 instead of m's alone. Stage 1 has two slots: for m it sends those of m, m-2, m-4 "
    "(themselves already wrong) to stage 0. Only micro-batch 0 is right. Stage 2's own parameters (rank 2) are right, stage 1's (rank 1) and stage 0's (rank 0) are wrong: activations of later micro-batches meet the gradients of earlier ones too (with seed 0 <d, r> / <r, r> is 1.2 to 2.9 on stage 1 and 0.3 to 5.1 on stage 0, no common factor). The forward, the loss, the divisor (valid frames of the whole batch), the rows and the schedule are right. "
    "Fix: slot.grad = None after sending."
)
