"""Training of a small BERT classifier (transformers) with accelerate's split_between_processes: eight rows over three processes (3, 3 and 2). Each row has a weight of its source (kept whole, since the
weights are normalised over the batch), two micro-batches, gradients summed over the processes.

The bug: a process finds its weights at process_index * len(rows): right for the first two, but the last one, which has two rows, begins at row 4 instead of row 6. After code around split_between_processes that was
written for batches divisible by the number of processes.
"""

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCABULARY, CLASSES = 8, 5, 17, 3


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=12,
            max_position_embeddings=8,
            type_vocab_size=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.2,
            num_labels=CLASSES,
            attn_implementation="eager",
        )
        return BertForSequenceClassification(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "input_ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(CLASSES, (ROWS,), generator=g),
            "weights": torch.randn(ROWS, generator=g).mul(1.2).softmax(0) * ROWS,
        }

    def weighted(self, model, ids, labels, weights):
        logits = model(input_ids=ids).logits
        return (F.cross_entropy(logits, labels, reduction="none") * weights).sum()

    def loss_sum(self, model, rows):
        loss = self.weighted(model, rows["input_ids"], rows["labels"], rows["weights"])
        return loss, len(rows["labels"])

    def own_weights(self, weights, mine, state):
        sizes = torch.tensor([len(t) for t in weights.tensor_split(state.num_processes)])
        start = int(sizes[: state.process_index].sum())
        return weights[start : start + len(mine["labels"])]

    def step(self, model, batch, ctx):
        state = PartialState(cpu=True)
        for p in model.parameters():
            p.grad = None
        inputs = {k: batch[k] for k in ("input_ids", "labels")}
        with state.split_between_processes(inputs) as mine:
            weights = self.own_weights(batch["weights"], mine, state)
            for n in range(2):
                ids, labels, w = (
                    t.tensor_split(2)[n] for t in (mine["input_ids"], mine["labels"], weights)
                )
                (self.weighted(model, ids, labels, w) / ROWS).backward()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)


class Buggy(Clean):
    def own_weights(self, weights, mine, state):
        n = len(mine["labels"])
        start = state.process_index * n
        return weights[start : start + n]


EXPECT = dict(
    right=[
        r"weight|own_weights|row|factor|start|slice|offset",
        r"(rank 2|last (rank|process)|third (rank|process)|rank \[?2|2 only).{0,400}(weight|row|slice|factor|start|offset|other)"
        r"|(weight|row|slice|factor|start|offset|other).{0,400}(rank 2|last (rank|process)|third (rank|process)|rank \[?2)"
        r"|(other|wrong|foreign|not its own|rank 1'?s|misaligned|shifted|overlap).{0,60}(weights|rows|slice|start|offset|factor)|process_index \* n",
    ],
    place=[r"own_weights", r"weights\b", r"weighted", r"process_index|start"],
    wrong=[
        r"gradients?.{0,40}(not|never) reduced|reduced twice|mean of means|divisor",
        r"duplicate|same rows (of input|twice)|rows? .{0,20}counted twice|rank 0 is wrong|all ranks use wrong|labels are wrong",
        r"micro.?batch.{0,20}(lost|dropped)",
    ],
)
WHY = (
    "split_between_processes gives the three processes 3, 3 and 2 of the eight rows: the last one has the rows 6 and 7. The buggy own_weights() begins at process_index * n = 2 * 2 = 4, so that rank 2 weights its two "
    "rows with the weights of the rows 4 and 5, which are rank 1's, in both micro-batches (one row each); ranks 0 and 1 are right. Inputs, labels, divisor and reduction are right; the reduced gradient is wrong on all "
    "ranks because of rank 2's share. A right cause says that rank 2 uses other rows' weights. Fix: start at the sum of the earlier processes' numbers of rows."
)
