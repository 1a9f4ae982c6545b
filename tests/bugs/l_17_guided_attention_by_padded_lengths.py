"""Text to speech with a guided attention loss: attention off the diagonal n / N = t / T is penalised. Modelled on ESPnet's
GuidedAttentionLoss and Mozilla TTS' (each utterance has its own lengths, the mask is padded after): in micro-batches trimmed to their
longest utterance the diagonal is drawn with the padded lengths.
"""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

TOPOLOGY = {"pools": {"speech": {"axes": {"dp": 2}}}}
ROWS, TEXT, FRAMES, LETTERS, MELS, WIDTH, MICRO_BATCHES, SHARPNESS = 11, 6, 9, 12, 4, 7, 2, 0.4


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters, self.frames = nn.Embedding(LETTERS, WIDTH), nn.Linear(MELS, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.norm, self.out = nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, MELS)

    def forward(self, text, text_mask, before):
        text, query = self.letters(text), self.frames(before)
        scores = query @ self.key(text).mT / WIDTH**0.5
        attention = scores.masked_fill(~text_mask[:, None], -1e9).softmax(-1)
        both = torch.cat([query, attention @ self.value(text)], -1)
        return self.out(F.gelu(self.norm(both))), attention


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "mel": lambda m, r: (self.sums(m, r, self.lengths)[0], r["n_frames"].sum()),
            "guide": lambda m, r: (self.sums(m, r, self.lengths)[1], r["n_frames"].sum()),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return Speech()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "text": torch.randint(LETTERS, (ROWS, TEXT), generator=g),
            "n_text": torch.randint(2, TEXT + 1, (ROWS,), generator=g),
            "mel": torch.randn(ROWS, FRAMES, MELS, generator=g),
            "n_frames": torch.randint(4, FRAMES + 1, (ROWS,), generator=g),
        }

    @staticmethod
    def lengths(rows):
        return rows["n_text"][:, None, None], rows["n_frames"][:, None, None]

    @staticmethod
    def sums(model, rows, lengths):
        place, time = torch.arange(rows["text"].shape[1]), torch.arange(rows["mel"].shape[1])
        text_mask, frame_mask = place < rows["n_text"][:, None], time < rows["n_frames"][:, None]
        guess, attention = model(rows["text"], text_mask, F.pad(rows["mel"], (0, 0, 1, 0))[:, :-1])
        mel = ((guess - rows["mel"]).abs().mean(-1) * frame_mask).sum()
        n_text, n_frames = lengths(rows)
        off = place / n_text - time[:, None] / n_frames
        guide = (attention * (1 - (-off.square() / (2 * SHARPNESS**2)).exp())).sum(-1)
        return mel, 3.0 * (guide * frame_mask).sum()

    def loss_sum(self, model, rows):
        return sum(self.sums(model, rows, Clean.lengths)), rows["n_frames"].sum()

    def distribute(self, model, ctx):
        self.replica = DDP(model)
        return model

    def guide_lengths(self, rows):
        return self.lengths(rows)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        order = mine["n_frames"].argsort().tensor_split(MICRO_BATCHES)
        for i in range(MICRO_BATCHES):
            rows = {k: v[order[i]] for k, v in mine.items()}
            rows["text"], rows["mel"] = (
                rows["text"][:, : rows["n_text"].max()],
                rows["mel"][:, : rows["n_frames"].max()],
            )
            with nullcontext() if i == MICRO_BATCHES - 1 else self.replica.no_sync():
                loss = sum(self.sums(self.replica, rows, self.guide_lengths))
                (loss * ctx.world_size / batch["n_frames"].sum()).backward()


class Buggy(Clean):
    def guide_lengths(self, rows):
        return rows["text"].shape[1], rows["mel"].shape[1]


EXPECT = dict(
    right=[
        r"guide|attention|second term",
        r"letters|frames|key|loss|term|guide",
        r"wrong|differ|row|length|pad|not proportional|unequal|coefficient|weigh|factor|other|value|direction",
    ],
    place=[r"guide|attention", r"key|letters|frames"],
    wrong=[
        r"\b(out|norm|value)\.\S+ (is|are|has|have) (a )?wrong",
        r"\bmel\b (term|loss)\S* .{0,25}(is|was|has) (wrong|lost|scaled|missing|counted)",
        r"(never|not) (been )?(all.?)?(reduced|summed|averaged)",
        r"forward (pass )?(is|was) wrong",
        r"(reduced|counted|summed) (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
    ],
)
WHY = (
    "The diagonal of the guide term is drawn with the padded text and frame lengths of the micro-batch instead of each utterance's own. "
    "The guide term is wrong for all utterances shorter than the longest of their micro-batch, so letters, frames and key have wrong "
    "gradients; value, norm and out get none from it and are right, as are the mel term and the forward."
)
