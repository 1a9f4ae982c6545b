"""Two-tower recommender under DDP on three ranks, two or three micro-batches each (no_sync but for the last): items are described by short texts and encoded by a tiny BERT (transformers), users by an id; every row has three
candidates, softmax over their scores. An item that occurs several times in a micro-batch is encoded once.

The bug: the vectors of encoded items are kept in a dictionary for the whole step, so that popular items of later micro-batches need not be encoded again; since the second backward then complains ("Trying to backward through the
graph a second time"), the vectors are kept detached, as advised in many threads on that message (a cache of differentiable values as in lab-cosmo/torch-pme issue 62 and pytorch/pytorch issue 71062). The item tower hears of a
popular item only in the first micro-batch in which it occurs.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
WIDTH, WORDS, LENGTH, USERS = 8, 13, 4, 6
PARTS = [[(0, 2), (2, 3)], [(3, 4), (4, 6), (6, 7)], [(7, 9), (9, 11)]]
CANDIDATES = [
    [0, 1, 2],
    [3, 0, 4],
    [5, 0, 1],
    [1, 0, 6],
    [7, 1, 8],
    [9, 0, 7],
    [10, 1, 0],
    [2, 3, 0],
    [4, 1, 3],
    [5, 6, 7],
    [8, 9, 5],
]


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, WIDTH)
        self.user_out = nn.Linear(WIDTH, WIDTH)
        config = BertConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=12,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.3,
            attn_implementation="eager",
        )
        self.item = BertModel(config, add_pooling_layer=False)
        self.item_out = nn.Linear(WIDTH, WIDTH)

    def encode(self, text):
        return self.item_out(self.item(input_ids=text).last_hidden_state.mean(1))

    def forward(self, rows, known):
        ids, text = rows["candidates"], rows["text"]
        new = {}
        for row, place in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
            number = int(ids[row, place])
            if number not in known and number not in new:
                new[number] = text[row, place]
        vectors = dict(known)
        if new:
            vectors.update(zip(new, self.encode(torch.stack(list(new.values())))))
        items = torch.stack([vectors[i] for i in ids.flatten().tolist()]).unflatten(0, ids.shape)
        users = self.user_out(torch.tanh(self.user(rows["user"])))
        scores = (users[:, None] * items).sum(-1)
        return F.cross_entropy(scores, rows["clicked"], reduction="sum"), vectors


class Clean:
    keep = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return TwoTower()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(CANDIDATES)
        catalogue = torch.randint(WORDS, (11, LENGTH), generator=g)
        candidates = torch.tensor(CANDIDATES)
        return {
            "user": torch.randint(USERS, (rows,), generator=g),
            "candidates": candidates,
            "text": catalogue[candidates],
            "clicked": torch.randint(3, (rows,), generator=g),
        }

    def loss_sum(self, model, rows):
        return model(rows, {})[0], len(rows["user"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        known = {}
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss, vectors = model(rows, known)
                (loss * ctx.world_size / len(CANDIDATES)).backward()
            if self.keep:
                known = {number: vector.detach() for number, vector in vectors.items()}


class Buggy(Clean):
    keep = True


EXPECT = dict(
    right=[
        r"(?i)item|bert|tower|encod",
        r"(?i)detach|cut|cach|kept|no gradient|gradient (does not|never|is not|stops|ends|missing|lost)|not (called|run|reached|encoded|sent|handed)|skip|left out|graph|miss(es|ing)?|fewer|without|lost|less",
        r"(?i)later|second|third|last|micro.?batch(es)? [12]|micro.?batch|rows? [0-9]|popular|repeated|again",
    ],
    place=[r"(?i)item|bert|tower|encod"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted twice|no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)\buser(_out)?\b[^.]{0,30}(is|are) wrong",
        r"(?i)(loss|scores|labels?|targets?) (is|are) (wrong|other|different)",
        r"(?i)first micro.?batch(es)? .{0,30}(lost|dropped|wrong|missing)|(the )?only (the )?last micro.?batch",
        r"(?i)whole micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only (on )?rank [012]\b|every row",
    ],
)
WHY = (
    "The losses, scores and the whole forward have the right values on all ranks; the graph of the item tower (item, item_out) is cut for items that were already encoded in an earlier micro-batch of the same rank: their vectors "
    "are taken detached from a dictionary. Rank 0, micro-batch 1 (row 2): items 0 and 1; rank 1, micro-batch 1 (rows 4, 5): items 1 and 0, micro-batch 2 (row 6): items 1 and 0. Rank 2 is right: all items of its micro-batch 1 (rows"
    " 9, 10: items 5 to 9) are new there. The gradients of item.* and item_out.* lack these parts, equally on all ranks after DDP's average; user and user_out are right (they read the vectors' values only). First micro-batches, "
    "divisor 11, no_sync and reduction are right. Fix: encode the items of every micro-batch with a graph (dictionary emptied per micro-batch), or collect the gradients on the kept vectors and send them through the tower once at "
    "the end."
)
