"""A streaming acoustic encoder (causal convolutions, a GRU, frame labels) cut into three pipeline stages (pp 3), all forwards before the backwards, four micro-batches of utterances of 8, 5, 6 and 7 frames. The stages exchange tensors
of a fixed 8 frames: shorter micro-batches are filled up with zeros on the left (the past, as for a causal model) for the way and cut out again by the receiver. At the end every rank gets the gradients of all stages.

The bug: on the way back the gradient is filled up on the left too, but the receiver keeps the FIRST n of the 8 frames, as one would with padding on the right. For micro-batches shorter than 8 frames the gradient is shifted in time,
the last frames' gradient is lost. After deepspeedai/DeepSpeed issue 3195 and 4777 (pipeline tensors cut to one fixed shape, inputs of different lengths) and NVIDIA/Megatron-LM issue 1066.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
FRAMES, BANDS, WIDTH, PHONES = 8, 4, 6, 5
LENGTHS = [8, 8, 5, 6, 6, 6, 7]
PARTS = [(0, 2), (2, 3), (3, 6), (6, 7)]


class Causal(nn.Module):
    def __init__(self, inside, outside, width=3):
        super().__init__()
        self.width = width
        self.conv = nn.Conv1d(inside, outside, width)

    def forward(self, x):
        return self.conv(F.pad(x.transpose(1, 2), (self.width - 1, 0))).transpose(1, 2)


class Front(nn.Module):
    def __init__(self):
        super().__init__()
        self.near, self.far = Causal(BANDS, WIDTH), Causal(WIDTH, WIDTH, 2)

    def forward(self, x):
        return torch.tanh(self.far(F.silu(self.near(x))))


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x + self.gru(x)[0])


class Back(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = Causal(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, PHONES)

    def forward(self, x):
        return self.head(x + F.silu(self.mix(x)))


def utterances(rows):
    n = int(rows["length"].max())
    return rows["audio"][:, :n], rows["phone"][:, :n]


def frame_loss(scores, phones):
    return F.cross_entropy(scores.flatten(0, 1), phones.flatten(), reduction="sum")


class Clean:
    first_frames = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return nn.Sequential(Front(), Middle(), Back())

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(LENGTHS)
        return {
            "audio": torch.randn(rows, FRAMES, BANDS, generator=g),
            "phone": torch.randint(PHONES, (rows, FRAMES), generator=g),
            "length": torch.tensor(LENGTHS),
        }

    def loss_sum(self, model, rows):
        loss = 0.0
        for length in sorted(set(rows["length"].tolist())):
            there = rows["length"] == length
            audio, phones = utterances({k: v[there] for k, v in rows.items()})
            loss = loss + frame_loss(model(audio), phones)
        return loss, int(rows["length"].sum())

    @staticmethod
    def send(x, to):
        dist.send(F.pad(x.detach(), (0, 0, FRAMES - x.shape[1], 0)).contiguous(), to)

    @staticmethod
    def receive(rows, frames, source, like, first_frames=False):
        buffer = torch.empty(rows, FRAMES, WIDTH, dtype=like.dtype, device=like.device)
        dist.recv(buffer, source)
        return buffer[:, :frames] if first_frames else buffer[:, FRAMES - frames :]

    def step(self, model, batch, ctx):
        rank, last = ctx.rank, ctx.world_size - 1
        weight = next(model.parameters())
        inputs, outputs = [], []
        for low, high in PARTS:
            audio, phones = utterances({k: v[low:high] for k, v in batch.items()})
            if rank == 0:
                x = audio.to(weight.dtype)
            else:
                x = self.receive(high - low, audio.shape[1], rank - 1, weight).clone()
                x.requires_grad_()
            y = model[rank](x)
            if rank < last:
                self.send(y, rank + 1)
            else:
                y = frame_loss(y, phones) / sum(LENGTHS)
            inputs.append(x)
            outputs.append(y)
        for x, y in zip(inputs, outputs):
            if rank == last:
                y.backward()
            else:
                y.backward(
                    self.receive(len(y), y.shape[1], rank + 1, weight, self.first_frames).clone()
                )
            if rank > 0:
                self.send(x.grad, rank - 1)
        for stage, part in enumerate(model):
            for p in part.parameters():
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                dist.broadcast(p.grad, stage)


class Buggy(Clean):
    first_frames = True


EXPECT = dict(
    right=[
        r"(?i)stage|pipeline|rank (0|1)|\b[01]\.(near|far|gru|norm)|boundary|receiv|sent|way back|hand",
        r"(?i)backward|gradient|way back|back(wards)?\b",
        r"(?i)(shift|other|wrong|mis|cut|crop|frame|differs|time|not (the )?(one|same|right)|different|in direction|hand)",
    ],
    place=[r"(?i)stage|rank [01]|boundary|\b[01]\.(near|far|gru|norm)|receiv|sent|Front|Middle"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)\b2\.(mix|head)[^.]{0,30} (is|are) wrong|Back('s)? .{0,20}gradients? (is|are) wrong",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)gradient of another micro.?batch|micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read|swapped)",
        r"(?i)all (four )?micro.?batch(es)?|only (on )?rank 2\b|adjoint of (the )?(gru|conv)",
    ],
)
WHY = (
    "The forward is right on all stages. On the way back from stage 2 to stage 1 and from stage 1 to stage 0 the receiving stage keeps frames 0 .. n-1 of the 8-frame buffer instead of 8-n .. 7. Micro-batch 0 (rows 0, 1; 8 frames) "
    "is right; micro-batch 1 (row 2; 5 frames), 2 (rows 3-5; 6 frames) and 3 (row 6; 7 frames) get a gradient that begins with 3, 2 and 1 frames of zeros, is shifted to later frames and lacks its last 3, 2 and 1 frames. So the "
    "gradients of stage 1 (gru, norm) are wrong in direction, those of stage 0 (near, far) twice over (wrong input gradient of stage 1, shifted once more); stage 2 (mix, head) is right. Every rank gets the same gradients by the "
    "broadcasts. Divisor 46, labels, order of micro-batches are right. Fix: cut the gradient out on the side where it was filled up, buffer[:, 8-n:]."
)
