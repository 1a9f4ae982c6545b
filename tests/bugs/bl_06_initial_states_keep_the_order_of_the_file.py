"""A recogniser of pen strokes labels every frame of a recording with a two-layer LSTM whose first states are made from an embedding of the writer, trained under DDP on two ranks (five and four of nine
recordings of unlike length; two micro-batches a rank, the first under no_sync). DDP averages, so the loss is multiplied by two and divided by the number of all frames. In training the recordings of a
micro-batch are sorted by their length and packed, as the fast recurrent kernels want it, and what comes out is put back into order.

The bug: the frames are sorted, the first states of the writers are not, so a recording starts with the states of another one's writer. After the class of reports about pack_padded_sequence with sorted batches
(PyTorch forum and issues before enforce_sorted, OpenNMT, AllenNLP's encoders, speech toolkits), where hidden states have to be permuted by hand.
"""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
PEN, WIDTH, LAYERS, WRITERS, CLASSES, LENGTH, ROWS = 3, 6, 2, 5, 4, 7, 9


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.writers = nn.Embedding(WRITERS, 4)
        self.start = nn.Linear(4, 2 * LAYERS * WIDTH)
        self.lstm = nn.LSTM(PEN, WIDTH, LAYERS, batch_first=True)

    def states(self, writer):
        start = self.start(torch.tanh(self.writers(writer))).view(-1, 2, LAYERS, WIDTH)
        h, c = start.permute(1, 2, 0, 3)
        return h.contiguous(), c.contiguous()

    def forward(self, frames, length, writer):
        return self.lstm(frames, self.states(writer))[0]


class PackedEncoder(Encoder):
    def __init__(self, plain):
        nn.Module.__init__(self)
        self.writers, self.start, self.lstm = plain.writers, plain.start, plain.lstm

    def states_for(self, writer, order):
        return self.states(writer[order])

    def forward(self, frames, length, writer):
        order = length.argsort(descending=True, stable=True)
        packed = pack_padded_sequence(frames[order], length[order].cpu(), batch_first=True)
        out, _ = self.lstm(packed, self.states_for(writer, order))
        out, _ = pad_packed_sequence(out, batch_first=True, total_length=frames.shape[1])
        return out[order.argsort()]


class PackedEncoderOfUnsortedWriters(PackedEncoder):
    def states_for(self, writer, order):
        return self.states(writer)


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, frames, length, writer):
        return self.head(self.encoder(frames, length, writer))


class Clean:
    encoder = PackedEncoder

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Recogniser()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "frames": torch.randn(ROWS, LENGTH, PEN, generator=g),
            "length": torch.tensor([3, 7, 4, 6, 5, 2, 6, 4, 7]).roll(self.seed % 2),
            "writer": torch.tensor([0, 1, 2, 3, 4, 3, 1, 0, 2]),
            "labels": torch.randint(CLASSES, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["frames"], rows["length"], rows["writer"])
        real = torch.arange(LENGTH) < rows["length"][:, None]
        return F.cross_entropy(logits[real], rows["labels"][real], reduction="sum"), int(real.sum())

    def distribute(self, model, ctx):
        model.encoder = self.encoder(model.encoder)
        return DistributedDataParallel(model)

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        frames = int(batch["length"].sum())
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for n in range(2):
            with model.no_sync() if n == 0 else nullcontext():
                loss, _ = self.loss_sum(model, {k: v.tensor_split(2)[n] for k, v in mine.items()})
                (loss * ctx.world_size / frames).backward()


class Buggy(Clean):
    encoder = PackedEncoderOfUnsortedWriters


EXPECT = dict(
    right=[
        r"order|sort|permut|(wrong|other|another) (row|writer|recording|state|sample)|rows? .{0,40}(swap|mixed|exchang|of another)|forward|index",
        r"state|writer|encoder|lstm|start|initial|length",
    ],
    place=[r"states_for", r"writer", r"encoder", r"lstm", r"\bstart\b"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"backward formula|head .{0,20}(computes|is) wrong|labels .{0,20}(are|is) (wrong|of other)|padding .{0,20}(is )?(counted|scored)",
    ],
)
WHY = (
    "PackedEncoderOfUnsortedWriters.states_for makes the first states from the writers in the order of the batch, while the frames that go into the packed LSTM are sorted by length; row i of the sorted batch "
    "starts with the states of row i of the unsorted one. The outputs are put back into order rightly. In every micro-batch whose lengths are not in falling order, on both ranks, the LSTM's output and so the "
    "loss are wrong, and the gradients of all parameters with them, above all writers and start, which learn from the frames of other recordings. Frames, lengths, labels, mask, no_sync, DDP's average and the "
    "divisor are right. Fix: index the states (or the writers) by the same order."
)
