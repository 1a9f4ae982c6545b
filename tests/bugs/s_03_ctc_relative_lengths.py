"""Speech recognition: a strided convolution, a bidirectional GRU over packed ragged utterances and CTC, DDP of three with no_sync for all but
the last micro-batch. After the relative lengths of SpeechBrain-like recipes: lengths are kept as a share of the longest utterance
and made frames again with the padded length of the logits.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
LENGTHS = [18, 24, 14, 16, 12, 20, 10]
SAID = [4, 5, 3, 2, 3, 4, 2]
LONGEST, MEL, WIDTH, SIGNS, MICRO = 24, 6, 7, 9, 2


class Acoustic(nn.Module):
    def __init__(self):
        super().__init__()
        self.stride = nn.Conv1d(MEL, WIDTH, 3, stride=2, padding=1)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, SIGNS)

    def forward(self, x, frames):
        h = F.silu(self.stride(x.transpose(1, 2))).transpose(1, 2)
        packed = pack_padded_sequence(h, frames.cpu(), batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=h.shape[1])
        return self.head(h)


def ctc(logits, share, rows):
    """`share` of the padded length is speech."""
    frames = (share * logits.shape[1]).round().long()
    lp = logits.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(lp, rows["said"], frames, rows["signs"], blank=0, reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Acoustic()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        length = torch.tensor(LENGTHS)
        x = torch.randn(len(length), LONGEST, MEL, generator=g)
        return {
            "x": x * (torch.arange(LONGEST) < length[:, None])[..., None],
            "length": length,
            "said": torch.randint(1, SIGNS, (len(length), max(SAID)), generator=g),
            "signs": torch.tensor(SAID),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["x"], rows["length"] // 2)
        return ctc(logits, rows["length"] / LONGEST, rows), rows["signs"].sum()

    def distribute(self, model, ctx):
        return DDP(model, process_group=ctx.group("dp"))

    def shares(self, rows, padded):
        return rows["length"] / padded

    def step(self, model, batch, ctx):
        n, me = ctx.axes["dp"], ctx.coords["dp"]
        rows = {k: v.tensor_split(n)[me] for k, v in batch.items()}
        rows["share"] = self.shares(rows, batch["x"].shape[1])
        for i in range(MICRO):
            part = {k: v.tensor_split(MICRO)[i] for k, v in rows.items()}
            with model.no_sync() if i < MICRO - 1 else contextlib.nullcontext():
                logits = model(part["x"], part["length"] // 2)
                (ctc(logits, part["share"], part) * n / batch["signs"].sum()).backward()


class Buggy(Clean):
    def shares(self, rows, padded):
        return rows["length"] / rows["length"].max()


EXPECT = dict(
    right=[
        r"loss|ctc|logits?|head|length|share",
        r"rank\S* .{0,6}[12]|ctc|length|share|positions?|frames|argument|line|loss",
    ],
    place=[r"loss|ctc|head|logits", r"ranks? .{0,10}[12]|ranks"],
    wrong=[
        r"forward is right up to .{0,40}goes wrong in (stride|gru|head)",
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc|no_sync .{0,30}(lost|missing)",
        r"(own|local) (count|denominator|divisor)",
        r"rows? (are |is )?(read twice|never read)",
        r"wrong (on|in) (every|all three) rank",
    ],
)
WHY = (
    "The relative lengths are divided by the longest utterance of the own rank, while the logits are padded to the longest of the whole "
    "batch. Rank 0 holds the longest and is right; on ranks 1 (16 for 24) and 2 (20 for 24) CTC reads 12 frames where there are 8, 9 for 6, 12 for "
    "10, 6 for 5: padded frames enter the alignment. All modules' forwards, the count and the reduction are right; the loss is not."
)
