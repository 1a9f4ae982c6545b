"""transformers' FNet with its masked language model head (tied table), DistributedDataParallel over
two ranks (3 and 2 of 5 rows), micro-batches of two rows, the earlier ones under no_sync. Which
words are hidden, and what is shown in their place (mostly [MASK], sometimes another word or the
word itself), comes with the batch.

Bug: the labels are no copy of the words but the same tensor, into which the shown words are then
written; the model learns to say [MASK]. After collators with `labels = inputs` without clone().
"""

import contextlib

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import FNetConfig, FNetForMaskedLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, T, VOCAB, MASK, NOTHING = 5, 9, 17, 4, -100


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 66)
        config = FNetConfig(
            vocab_size=VOCAB,
            hidden_size=10,
            num_hidden_layers=2,
            intermediate_size=13,
            max_position_embeddings=12,
            type_vocab_size=2,
            hidden_dropout_prob=0.0,
            initializer_range=0.3,
        )
        model = FNetForMaskedLM(config)
        model.fnet.pooler = None
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 660)
        ids = torch.randint(5, VOCAB, (ROWS, T), generator=g)
        hidden = torch.rand(ROWS, T, generator=g) < 0.4
        hidden[:, 2] = True
        fate = torch.rand(ROWS, T, generator=g)
        shown = torch.where(fate < 0.7, MASK, ids)
        other = torch.randint(5, VOCAB, (ROWS, T), generator=g)
        shown = torch.where(fate > 0.85, other, shown)
        return {"ids": ids, "hidden": hidden, "shown": shown}

    def loss_sum(self, model, rows):
        words = torch.where(rows["hidden"], rows["shown"], rows["ids"])
        logits = model(input_ids=words).logits[rows["hidden"]]
        loss = F.cross_entropy(logits, rows["ids"][rows["hidden"]], reduction="sum")
        return loss, rows["hidden"].sum()

    def distribute(self, model, ctx):
        self.wrapped = DistributedDataParallel(model, process_group=ctx.group("dp"))
        return model

    def hide(self, rows):
        words = rows["ids"]
        labels = words.clone()
        words[rows["hidden"]] = rows["shown"][rows["hidden"]]
        labels[~rows["hidden"]] = NOTHING
        return words, labels

    def step(self, model, batch, ctx):
        ranks = ctx.axes["dp"]
        parts = torch.arange(ROWS).tensor_split(ranks)[ctx.coords["dp"]].split(2)
        total = batch["hidden"].sum()
        for i, part in enumerate(parts):
            words, labels = self.hide({k: v[part] for k, v in batch.items()})
            last = i == len(parts) - 1
            with contextlib.nullcontext() if last else self.wrapped.no_sync():
                logits = self.wrapped(input_ids=words).logits
                loss = F.cross_entropy(
                    logits.flatten(0, 1), labels.flatten(), ignore_index=NOTHING, reduction="sum"
                )
                (loss * ranks / total).backward()


class Buggy(Clean):
    def hide(self, rows):
        words = rows["ids"]
        labels = words
        words[rows["hidden"]] = rows["shown"][rows["hidden"]]
        return words, labels.masked_fill(~rows["hidden"], NOTHING)


EXPECT = dict(
    right=[
        r"label|target",
        r"alias|same tensor|in.?place|clone|copy|overwrit|written|shown|mask(ed)? (word|token|id)|"
        r"\[MASK\]|corrupt|changed after",
        r"label|words|hide|target|ids",
    ],
    place=[r"\bhide\b", r"labels = words", r"labels\.masked_fill", r"cross_entropy", r"words\["],
    wrong=[
        r"no_sync.{0,60}(wrong|never|missing|lost)",
        r"tied.{0,60}(twice|not|missing)",
        r"(total|count|divisor).{0,40}(wrong|local|own)",
        r"(input|words) .{0,40}not (hidden|masked)",
        r"fourier|fft",
        r"ignore.?index.{0,30}(wrong|missing|counted)",
    ],
)
WHY = """In Buggy.hide `labels = words` is the same tensor, not a copy, and the shown words ([MASK],
another word) are then written into it in place: at the hidden positions the labels are what is
shown and no longer the original words. Inputs, hidden positions, count and reduction are right;
the targets of the cross-entropy are wrong. A right cause says that the labels are overwritten
with / are the masked input. Fix: labels = words.clone() before the masking."""
