"""A tiny RoBERTa (transformers, masked language model) under DDP on three ranks. The rows (3, 2 and 2 on the ranks) are read in micro-batches of at most two; some rows hold several packed documents. A
micro-batch with a packed row brings its own mask by documents and its own position ids; a micro-batch without one leaves them to the model. The divisor is the number of masked words of the full batch.

The bug: the own position ids begin at 0 in each document; RoBERTa's begin at pad_token_id + 1 = 2. After the many reports on RoBERTa's shifted positions (huggingface/transformers issues 5285, 10736,
17729) and those on packing with position ids that restart per document.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import RobertaConfig, RobertaForMaskedLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
LENGTH, WORDS, PAD = 9, 19, 1
# lengths of the documents of each row; what is left is padding
ROWS = [(8,), (9,), (6,), (4, 3), (3, 5), (9,), (7,)]
AT_ONCE = 2


def own_positions(docs, first):
    """Places within the document, counted from `first`; padding has the number of the padding word."""
    before = (docs.unsqueeze(2) == docs.unsqueeze(1)).tril(-1).sum(-1)
    return (before + first).masked_fill(docs < 0, PAD)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        config = RobertaConfig(
            vocab_size=WORDS,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=12,
            max_position_embeddings=LENGTH + 4,
            type_vocab_size=1,
            pad_token_id=PAD,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.5,
            attn_implementation="eager",
        )
        self.bert = RobertaForMaskedLM(config)

    def forward(self, rows, first=None):
        """first: where the own positions begin; None leaves them to RoBERTa."""
        docs = rows["docs"]
        if first is None:
            logits = self.bert(rows["ids"], attention_mask=(docs >= 0).long()).logits
        else:
            apart = docs.unsqueeze(2) != docs.unsqueeze(1)
            dtype = next(self.parameters()).dtype
            mask = torch.zeros(apart.shape, dtype=dtype).masked_fill(apart, -1e9).unsqueeze(1)
            logits = self.bert(
                rows["ids"], attention_mask=mask, position_ids=own_positions(docs, first)
            ).logits
        return F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")


class Clean:
    first = PAD + 1

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(3, WORDS, (len(ROWS), LENGTH), generator=g)
        docs = torch.full((len(ROWS), LENGTH), -1)
        for row, lengths in enumerate(ROWS):
            at = 0
            for number, length in enumerate(lengths):
                docs[row, at : at + length] = number
                at += length
        ids[docs < 0] = PAD
        masked = (torch.rand(ids.shape, generator=g) < 0.45) & (docs >= 0)
        masked[:, 1] = True
        labels = ids.masked_fill(~masked, -100)
        return {"ids": ids.masked_fill(masked, 2), "docs": docs, "labels": labels}

    def loss_sum(self, model, rows):
        return model(rows, PAD + 1), (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = (mine["labels"] != -100).sum()
        dist.all_reduce(count)
        parts = list(zip(*(v.split(AT_ONCE) for v in mine.values())))
        for n, part in enumerate(parts):
            rows = dict(zip(mine, part))
            packed = bool((rows["docs"] > 0).any())
            with contextlib.nullcontext() if n == len(parts) - 1 else model.no_sync():
                loss = model(rows, self.first if packed else None)
                (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    first = 0


EXPECT = dict(
    right=[
        r"position|embeddings?|offset|first|bert",
        r"index|indices|ids?\b|argument|input|forward|shift|offset|other (value|row|entry)|differ",
    ],
    place=[r"position|first|embeddings"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"mean of (the )?means|wrong divisor|own count",
        r"(attention.?)?mask .{0,20}(is )?(wrong|missing)|backward formula",
        r"rank 0 .{0,40}wrong position|rank 2 .{0,40}wrong position",
        r"labels .{0,20}(shifted|wrong)",
    ],
)
WHY = (
    "Only rank 1's single micro-batch (rows 3 and 4, documents of 4+3 and 3+5 words) is packed. There position_ids are 0, 1, 2, ... in each document; right is 2, 3, 4, ... (PAD + 1 on). The position "
    "embedding reads rows two too low (row 1, the padding row, has no gradient at all). Ranks 0 and 2 (and their micro-batches, 2 on rank 0, 1 on rank 2) have no packed row and are right in forward and "
    "backward. After DDP's mean all gradients are wrong on all ranks. Mask by documents, labels, divisor, no_sync and the factor world_size are right. Fix: first = PAD + 1."
)
