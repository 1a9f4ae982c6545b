"""Spoken command recogniser as a pipeline of two stages, two pipelines side by side (dp 2 x pp 2), three micro-batches each. Stage 0 takes every second frame twice (two convolutions of width 3 and stride 2 without padding) and has an
attention layer, stage 1 an attention layer, the mean over the frames and the classifier. Both stages make the mask of the kept frames from the lengths. Every micro-batch is cut to its longest row; the divisor is the number of rows.

The bug: the mask is thinned by [:, :-2:2] twice, which keeps an output frame if the first of its three input frames is real. A short row beside a longer one gets one or two frames too many, which reach into the padding; the right slice
is [:, 2::2]. After espnet/espnet issue 3037 and wenet-e2e/wenet issues 221 and 1513, PR 1602.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 2}}}}
BANDS, WIDTH, WORDS = 3, 6, 5
LENGTHS = [23, 18, 13, 15, 21, 19, 14, 17, 23, 12, 20]
PARTS = [[(0, 2), (2, 4), (4, 5)], [(5, 7), (7, 8), (8, 11)]]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, there):
        y = self.norm(x)
        scores = self.query(y) @ self.key(y).transpose(1, 2) * WIDTH**-0.5
        scores = scores.masked_fill(~there[:, None], float("-inf"))
        return x + scores.softmax(-1) @ self.value(y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(BANDS, WIDTH, 3, stride=2)
        self.second = nn.Conv1d(WIDTH, WIDTH, 3, stride=2)
        self.low, self.high = Attention(), Attention()
        self.word = nn.Linear(WIDTH, WORDS)

    def stage0(self, sound, there):
        x = self.second(F.silu(self.first(sound.transpose(1, 2))))
        return self.low(x.transpose(1, 2), there)

    def stage1(self, x, there):
        x = self.high(x, there)
        mean = (x * there[..., None]).sum(1) / there.sum(1, keepdim=True)
        return self.word(mean)

    def forward(self, sound, there):
        return self.stage1(self.stage0(sound, there), there)


def kept(length, from_the_end):
    there = torch.arange(int(length.max()))[None] < length[:, None]
    for _ in range(2):
        there = there[:, 2::2] if from_the_end else there[:, :-2:2]
    return there


class Clean:
    from_the_end = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        length = torch.tensor(LENGTHS)
        sound = torch.randn(len(LENGTHS), max(LENGTHS), BANDS, generator=g)
        beyond = torch.arange(max(LENGTHS))[None] >= length[:, None]
        return {
            "sound": sound.masked_fill(beyond[..., None], 0.0),
            "length": length,
            "word": torch.randint(WORDS, (len(LENGTHS),), generator=g),
        }

    def loss_sum(self, model, rows):
        there = kept(rows["length"], True)
        scores = model(rows["sound"][:, : int(rows["length"].max())], there)
        return F.cross_entropy(scores, rows["word"], reduction="sum"), len(rows["word"])

    def step(self, model, batch, ctx):
        pipe = ctx.group("pp")
        stage = dist.get_rank(pipe)
        other = dist.get_global_rank(pipe, 1 - stage)
        for low, high in PARTS[dist.get_rank(ctx.group("dp"))]:
            rows = {k: v[low:high] for k, v in batch.items()}
            there = kept(rows["length"], self.from_the_end)
            if stage == 0:
                x = model.stage0(rows["sound"][:, : int(rows["length"].max())], there)
                dist.send(x.detach().contiguous(), other)
                grad = torch.empty(x.shape, dtype=x.dtype)
                dist.recv(grad, other)
                x.backward(grad)
            else:
                x = torch.empty(*there.shape, WIDTH, dtype=model.word.weight.dtype)
                dist.recv(x, other)
                x.requires_grad_()
                loss = F.cross_entropy(model.stage1(x, there), rows["word"], reduction="sum")
                (loss / len(batch["word"])).backward()
                dist.send(x.grad.contiguous(), other)
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)


class Buggy(Clean):
    from_the_end = False


EXPECT = dict(
    right=[
        r"(?i)mask|padding|padded|frames?|there|beyond|length",
        r"(?i)low|high|attention|softmax|mean|masked_fill|scores|kept",
        r"(?i)mask|forward|padding|frames|too many|more|other|wrong|input",
    ],
    place=[r"(?i)\blow\b|\bhigh\b|attention|kept|mask|frames"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)wrong only in the backward|forward is right|goes wrong in the backward",
        r"(?i)(first|second)( convolution)?('s)? (forward|output) .{0,20}wrong"
        r"|convolution .{0,20}goes wrong",
        r"(?i)sent .{0,30}(wrong|too early|of another micro.?batch)|gradient .{0,20}(not"
        r"|never) (sent|received)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"(?i)only (on )?rank [0123]\b|labels? .{0,20}wrong",
    ],
)
WHY = (
    "The mask of the kept frames is made by [:, :-2:2] twice in both stages. The last real output frame is that whose seven input frames (4 j .. 4 j + 6) are all real; the wrong mask keeps each whose first input frame 4 j is real "
    "and that exists in the micro-batch's width. Wrong are the short rows of a micro-batch with a longer one: row 1 (18 beside 23: frames 0-4 instead "
    "of 0-2), row 2 (13 beside 15), row 6 (14 beside 19), rows 9 and 10 (12 and 20 beside 23). The longest row of each micro-batch is right, and so are the micro-batches of one row (4, 7). The convolutions' outputs are right, "
    "extra frames that reach into the padding are attended to in low (from its softmax on) and high and taken into the mean "
    "in stage 1. So pipeline 0 is wrong in micro-batches 0 and 1, pipeline 1 in micro-batches 0 and 2. All gradients are wrong on all ranks. Pipeline transport, divisor 11 and the reduction over all ranks are right. Fix: there[:, 2::2]."
)
