"""Speech recognition with a bidirectional GRU and CTC under DDP of two, two micro-batches (no_sync). Every micro-batch is sorted by length
for pack_padded_sequence. After a well-known mistake with enforce_sorted=True: frames and lengths are put into the new order, the
transcripts are not.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import rnn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
LENGTHS, FEATURES, WIDTH, LETTERS, MICRO = [14, 12, 10, 13, 9, 11, 12], 6, 7, 8, 2
ROWS, FRAMES, LONGEST = len(LENGTHS), max(LENGTHS), 4


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Linear(FEATURES, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, LETTERS)

    def forward(self, x, lengths, ordered=False):
        packed = rnn.pack_padded_sequence(
            F.relu(self.front(x)), lengths, batch_first=True, enforce_sorted=ordered
        )
        h, _ = rnn.pad_packed_sequence(
            self.rnn(packed)[0], batch_first=True, total_length=x.shape[1]
        )
        return self.head(h)


def ctc(logits, lengths, text, letters):
    logp = logits.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(logp, text, lengths, letters, reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Listener()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FRAMES, FEATURES, generator=g),
            "frames": torch.tensor(LENGTHS),
            "text": torch.randint(1, LETTERS, (ROWS, LONGEST), generator=g),
            "letters": torch.randint(2, LONGEST + 1, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["x"], rows["frames"])
        return ctc(logits, rows["frames"], rows["text"], rows["letters"]), rows["letters"].sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def transcripts(self, rows, order):
        return rows["text"][order], rows["letters"][order]

    def step(self, model, batch, ctx):
        n, me = ctx.axes["dp"], ctx.coords["dp"]
        for i, at in enumerate(torch.arange(ROWS).tensor_split(n)[me].tensor_split(MICRO)):
            rows = {k: v[at] for k, v in batch.items()}
            frames, order = rows["frames"].sort(descending=True)
            with contextlib.nullcontext() if i == MICRO - 1 else model.no_sync():
                logits = model(rows["x"][order], frames, ordered=True)
                loss = ctc(logits, frames, *self.transcripts(rows, order))
                (loss * n / batch["letters"].sum()).backward()


class Buggy(Clean):
    def transcripts(self, rows, order):
        return rows["text"], rows["letters"]


EXPECT = dict(
    right=[r"loss|target|text|transcript|gradient that reaches", r"head|row|target|text|loss"],
    place=[r"head|loss|target|text|rows? .{0,25}[2345]"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"forward .{0,30}(goes )?wrong in",
        r"own (count|denominator|divisor)",
        r"rows? [016] .{0,20}(is|are) wrong",
        r"backward of (the )?(rnn|gru|front)\S* (is )?wrong",
    ],
)
WHY = (
    "After the sort the transcripts stay in the old order. Rows 2 and 3 (second micro-batch of rank 0) and rows 4 and 5 (first of rank 1) are "
    "swapped by the sort, so each is scored against the other's text; rows 0, 1 and 6 are right. The logits are right, the gradient that "
    "reaches `head` from the loss is that of other targets in these rows, and all gradients are wrong."
)
