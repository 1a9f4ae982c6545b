"""Matryoshka training of a retrieval encoder: transformers' BERT (whole on every rank), mean pooling and a projection to 15 dimensions that is column-parallel over three tensor ranks; two data ranks. Every row is a query, a passage and three hard negatives; the loss is the sum over the prefixes 4, 9 and 15 of
the embedding of the cross-entropy over cosine similarities. A rank adds up the products and squares of the dimensions it holds, and one all-reduce over the tensor ranks completes them.

The bug: the prefix is cut as if the shard were the whole, `own[..., : dim // tp]`, so that a prefix of 4 is dimension 0 of each of the three shards and a prefix of 9 the first three of each. sentence-transformers' MatryoshkaLoss cuts `tensor[..., :dim]` (losses/MatryoshkaLoss.py; for
its ways to cut wrongly see PRs #2719 and #3203); of the kind of a global index used inside a shard.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from transformers import BertConfig, BertModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 3}}}}
ROWS, TEXTS, WIDTH, WORDS, DIM, PREFIXES, HEAT, MICRO = 7, 5, 6, 19, 15, (4, 9, 15), 0.2, 2


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = BertModel(
            BertConfig(
                vocab_size=WORDS,
                hidden_size=12,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=16,
                max_position_embeddings=WIDTH,
                type_vocab_size=1,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                initializer_range=0.3,
                attn_implementation="eager",
            ),
            add_pooling_layer=False,
        )
        self.project = nn.Linear(12, DIM)

    def forward(self, ids, mask):
        h = self.bert(ids.flatten(0, 1), attention_mask=mask.flatten(0, 1)).last_hidden_state
        there = mask.flatten(0, 1)[..., None].to(h.dtype)
        return self.project((h * there).sum(1) / there.sum(1)).unflatten(0, ids.shape[:2])


class SumOverShards(torch.autograd.Function):
    """The sum over the tensor ranks; what follows is computed on all of them alike, so the gradient passes through."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def prefix_losses(parts, complete):
    """The loss of these rows, from the prefixes of the embeddings [rows, texts, dimensions held]."""
    loss = 0
    for part in parts:
        products = (part[:, :1] * part[:, 1:]).sum(-1)
        squares = part.square().sum(-1)
        both = complete(torch.cat([products, squares], 1))
        products, squares = both[:, : TEXTS - 1], both[:, TEXTS - 1 :]
        cosine = products / (squares[:, :1] * squares[:, 1:] + 1e-6).sqrt()
        loss = loss + F.cross_entropy(
            cosine / HEAT, torch.zeros(len(cosine), dtype=torch.long), reduction="sum"
        )
    return loss


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Encoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        length = torch.randint(2, WIDTH + 1, (ROWS, TEXTS), generator=g)
        return {
            "ids": torch.randint(WORDS, (ROWS, TEXTS, WIDTH), generator=g),
            "mask": (torch.arange(WIDTH) < length[..., None]).long(),
        }

    def loss_sum(self, model, rows):
        embedded = model(rows["ids"], rows["mask"])
        return prefix_losses([embedded[..., :dim] for dim in PREFIXES], lambda x: x), len(embedded)

    def distribute(self, model, ctx):
        return parallelize_module(model, ctx.mesh["tp"], {"project": ColwiseParallel()})

    def own_prefix(self, own, dim, ctx):
        first = ctx.coords["tp"] * own.shape[-1]
        return own[..., : max(0, dim - first)]

    def step(self, model, batch, ctx):
        def complete(x):
            return SumOverShards.apply(x, ctx.group("tp"))

        mine = {
            k: v.tensor_split(2)[ctx.coords["dp"]].tensor_split(MICRO) for k, v in batch.items()
        }
        for m in range(MICRO):
            own = model(mine["ids"][m], mine["mask"][m])
            loss = prefix_losses([self.own_prefix(own, dim, ctx) for dim in PREFIXES], complete)
            (loss / ROWS).backward()
        for p in model.parameters():
            grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            dist.all_reduce(grad, group=ctx.group("dp"))


class Buggy(Clean):
    def own_prefix(self, own, dim, ctx):
        return own[..., : dim // 3]


EXPECT = dict(
    right=[
        r"project|prefix|dimension|embedding|shard|matryoshka|slice",
        r"prefix|dimension|slice|index|offset|rows? of (the )?(weight|project)|shard|local|own|column|rank|first wrong|forward|differ",
        r"prefix|tp|tensor|shard|offset|own|slice|loss|index|dimension",
    ],
    place=[
        r"project|prefix|dimension|embedding|shard|tensor (parallel|rank)|\btp\b|own_prefix|prefix_losses|slice"
    ],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing all.?reduc|no (sum|reduction) over",
        r"(reduced|summed|added) (twice|again)",
        r"each rank .{0,20}own (count|number|denominator)",
        r"micro.?batch\S* .{0,20}(lost|dropped|overwritten)",
        r"backward of the all.?reduce (is|must|should)|adjoint",
        r"data.?parallel .{0,30}wrong|over dp .{0,20}(wrong|missing)",
        r"pure(ly)? (a )?(scale|factor)|by one (and the same )?factor",
    ],
)
WHY = (
    "The three tensor ranks hold dimensions 0-4, 5-9 and 10-14 of the embedding. The prefix of 4 should be dimensions 0-3, all on tensor rank 0, and the prefix of 9 dimensions 0-8, five on tensor rank 0 and four on tensor rank 1; the step takes dimensions 0, 5, 10 and 0-2, 5-7, 10-12. So two of three losses are "
    "computed from wrong dimensions: the forward of the encoder is right, the similarities of the two shorter prefixes are wrong (on all ranks alike), and all gradients are. Visible in project: on tensor rank 2 dimensions 10-12 get gradients of prefixes they are not in; on tensor rank 0 dimensions 1-4 miss theirs. "
    "The third loss, over all 15 dimensions, is right, as are the all-reduce, its backward, the sum over data ranks, the division by 7 rows, the two micro-batches. The fix is to take the part of [0, dim) that lies in the shard, : dim - first."
)
