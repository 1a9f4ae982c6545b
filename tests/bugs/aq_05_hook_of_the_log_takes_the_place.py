"""Sentence classification with BERT (transformers BertForSequenceClassification) and accelerate on three ranks, two micro-batches each (accelerator.no_sync for the first). The weights come from a model that multiplies the output of the
embeddings by sqrt(width); an accelerate ModelHook on bert.embeddings does so. Mean over all sentences of all ranks; the ranks have 3, 4 and 3 of them.

The bug: the main process hangs a second hook on bert.embeddings that records the size of the embeddings for the log. add_hook_to_module replaces a hook that is there unless append=True is given, so on rank 0 the scaling is gone. As in
huggingface/accelerate PR 768 / issue 767 (a second add_hook_to_module deletes the first hook; append was added for it).
"""

import contextlib

import torch
from accelerate import Accelerator
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
VOCABULARY, LENGTH, WIDTH, CLASSES = 13, 6, 8, 4
PARTS = [[(0, 1), (1, 3)], [(3, 5), (5, 7)], [(7, 9), (9, 10)]]


class Scale(ModelHook):
    """Multiplies what the module returns."""

    def __init__(self, factor):
        self.factor = factor

    def post_forward(self, module, output):
        return output * self.factor


class Record(ModelHook):
    """Keeps the mean size of what the module returns."""

    def __init__(self):
        self.sizes = []

    def post_forward(self, module, output):
        self.sizes.append(float(output.detach().abs().mean()))
        return output


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=12,
            max_position_embeddings=LENGTH,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.4,
        )
        self.net = BertForSequenceClassification(config)
        add_hook_to_module(self.net.bert.embeddings, Scale(WIDTH**0.5))

    def forward(self, ids, length):
        there = torch.arange(ids.shape[1])[None] < length[:, None]
        return self.net(input_ids=ids, attention_mask=there.long()).logits


def sentence_loss(model, rows):
    return F.cross_entropy(model(rows["ids"], rows["length"]), rows["label"], reduction="sum")


class Clean:
    append = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(1, VOCABULARY, (10, LENGTH), generator=g),
            "length": torch.tensor([6, 3, 5, 4, 6, 2, 5, 6, 4, 3]),
            "label": torch.randint(CLASSES, (10,), generator=g),
        }

    def loss_sum(self, model, rows):
        return sentence_loss(model, rows), len(rows["label"])

    def distribute(self, model, ctx):
        self.accelerator = Accelerator(cpu=True)
        if self.accelerator.is_main_process:
            add_hook_to_module(model.net.bert.embeddings, Record(), append=self.append)
        return self.accelerator.prepare_model(model)

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            last = turn == len(parts) - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
                loss = sentence_loss(model, rows) * ctx.world_size / len(batch["label"])
                self.accelerator.backward(loss)


class Buggy(Clean):
    append = False


EXPECT = dict(
    right=[
        r"(?i)rank 0|ranks? \[?0\]?|main process|one rank",
        r"(?i)forward|output|values?|scal|hook",
        r"(?i)embeddings|encoder|input|hook",
    ],
    place=[r"(?i)embeddings|hook"],
    wrong=[
        r"(?i)on (all|every|both) ranks?[^.]{0,40}(forward|wrong)|rank [12] (alone|is wrong)|only (on )?rank [12]",
        r"(?i)(not|never) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync.{0,30}(wrong|late|early)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)forward is right|wrong only in the backward|goes wrong in the backward",
        r"(?i)labels? .{0,20}(is|are) (wrong|of)|other rows|(attention|padding) mask .{0,20}(is )?wrong",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never)|only micro.?batch",
    ],
)
WHY = (
    "On rank 0, in both micro-batches (rows 0-2), the forward is wrong from bert.embeddings on: its output is not multiplied by sqrt(8), because add_hook_to_module(Record()) without append=True replaced the Scale hook there. Ranks 1 "
    "and 2 are right. Rank 0's contributions to all gradients are those of another model (encoder with unscaled input; embeddings besides without the factor in the backward), and DDP's average carries that to all ranks equally. Divisor "
    "10, labels, attention masks, no_sync and reduction are right. Fix: append=True."
)
