"""Named entity recognition with BertForTokenClassification of transformers (tiny, from a config) under DDP on three ranks, two micro-batches each. The file has tag names; every rank makes its list of tags from what it reads and turns
names into class numbers with it. The divisor is the number of tagged tokens of all ranks.

The bug: the list of tags is not sorted and not shared; every process numbers the tags in the order in which they appear in its own part of the file, so one class number means different tags on different ranks. As in
RomRoc/objdet_fizyr_colab pull request 5 and agemagician/ProtTrans issue 37 (order of a set of labels); transformers' run_ner sorts the list "for determinism".
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForTokenClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
TOKENS, VOCABULARY, WIDTH, TAGS = 7, 23, 8, 5
NAMES = ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]
PARTS = [[(0, 2), (2, 5)], [(5, 7), (7, 8)], [(8, 11), (11, 12)]]
LENGTHS = [7, 5, 6, 3, 7, 7, 4, 6, 7, 2, 5, 7]
FIRST = {0: [0, 1, 2, 3, 4], 5: [4, 1, 3, 0, 2], 8: [2, 4, 0, 1, 3]}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=12,
            max_position_embeddings=TOKENS,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=TAGS,
            pad_token_id=0,
            initializer_range=0.3,
            attn_implementation="eager",
        )
        self.bert = BertForTokenClassification(config)

    def forward(self, ids, mask):
        return self.bert(input_ids=ids, attention_mask=mask).logits


def tag_list(rows, in_order):
    """The names of the tags that the rows have: their place in the list is the class."""
    seen = [NAMES[t] for t in rows["tag"].flatten().tolist() if t >= 0]
    return list(dict.fromkeys(seen)) if in_order else NAMES


def tagging_loss(model, rows, names):
    classes = [names.index(NAMES[t]) if t >= 0 else -100 for t in rows["tag"].flatten().tolist()]
    logits = model(rows["ids"], rows["mask"])
    return F.cross_entropy(
        logits.flatten(0, 1), torch.tensor(classes), reduction="sum", ignore_index=-100
    )


class Clean:
    in_order = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Tagger()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(LENGTHS)
        tag = torch.randint(TAGS, (rows, TOKENS), generator=g)
        for row, first in FIRST.items():
            tag[row, :TAGS] = torch.tensor(first)
        mask = torch.arange(TOKENS)[None] < torch.tensor(LENGTHS)[:, None]
        return {
            "ids": torch.randint(1, VOCABULARY, (rows, TOKENS), generator=g) * mask,
            "mask": mask.long(),
            "tag": tag.masked_fill(~mask, -100),
        }

    def loss_sum(self, model, rows):
        return tagging_loss(model, rows, NAMES), int((rows["tag"] >= 0).sum())

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        tokens = int((batch["tag"] >= 0).sum())
        parts = PARTS[ctx.rank]
        mine = {k: v[parts[0][0] : parts[-1][1]] for k, v in batch.items()}
        names = tag_list(mine, self.in_order)
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (tagging_loss(model, rows, names) * ctx.world_size / tokens).backward()


class Buggy(Clean):
    in_order = True


EXPECT = dict(
    right=[
        r"(?i)label|target|class|tag|loss",
        r"(?i)label|target|class|tag|other|wrong|differ|own|shift|permut|number",
    ],
    place=[r"(?i)label|target|tag\b|tags\b|class(es)?\b|loss|classifier"],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their) own|mean of means|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward|wrong only in the backward",
        r"(?i)shifted by one|attention mask .{0,20}wrong|padding .{0,20}(counted|attended)",
        r"(?i)rank 0 (is|has|reads) (wrong|other)|only (on )?rank [012]\b|all (three )?ranks (are|have) wrong",
    ],
)
WHY = (
    "Rank 0's part begins with the tags in sorted order, so its list is the right one and its two micro-batches are right. Rank 1 (rows 5-7) has the list O, B-PER, I-PER, B-LOC, I-LOC, rank 2 (rows 8-11) has I-LOC, O, B-LOC, B-PER, "
    "I-PER: all their labels go through another numbering (rank 1: tag 1 keeps class 1, the others 4->0, 3->2, 0->3, 2->4; rank 2: 2->0, 4->1, 0->2, 1->3, 3->4). The forward (logits) is right on all ranks; loss and gradient at the logits "
    "of ranks 1 and 2 are wrong in all their rows and both micro-batches, and so the gradients of all parameters, equally on all ranks after DDP's average. Divisor, masks, no_sync, reduction are right. Fix: sort the list of all tags (or "
    "make it on one rank and broadcast it)."
)
