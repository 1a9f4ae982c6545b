"""A dependency parser trained by the matrix-tree theorem, FSDP2 over three ranks, two
micro-batches.

A convolutional encoder and a biaffine layer score every arc head -> word, and each word as a root.
The log of the sum over all (multi-root) trees is the log determinant of the Laplacian; the loss is
that minus the gold tree's score.

The bug: the Laplacian's diagonal sums a column of exp(scores) with the word's arc to itself in it;
the diagonal is taken out only afterwards. After implementations of Koo et al.'s structured
Laplacian, where masking and summing are two lines in either order.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, LENGTH, WORDS, DIM, HIDDEN = 10, 6, 13, 5, 7


class Parser(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, DIM)
        self.encoder = nn.Conv1d(DIM, HIDDEN, 3, padding=1)
        self.head = nn.Linear(HIDDEN, DIM)
        self.child = nn.Linear(HIDDEN, DIM)
        self.arc = nn.Linear(DIM, DIM, bias=False)
        self.root = nn.Linear(HIDDEN, 1)

    def forward(self, words, lengths):
        real = torch.arange(words.shape[1]) < lengths[:, None]
        x = self.words(words) * real[..., None]
        x = torch.tanh(self.encoder(x.transpose(1, 2))).transpose(1, 2)
        arcs = self.arc(torch.tanh(self.head(x))) @ torch.tanh(self.child(x)).transpose(1, 2)
        return arcs, self.root(x).squeeze(-1), real


def gold_score(arcs, roots, heads, real):
    chosen = arcs.gather(1, heads.clamp(min=0)[:, None]).squeeze(1)
    return (torch.where(heads < 0, roots, chosen) * real).sum(1)


def log_trees(arcs, roots, real):
    inside = real[:, :, None] & real[:, None, :]
    inside = inside & ~torch.eye(arcs.shape[1], dtype=torch.bool)
    weights = arcs.exp() * inside
    diagonal = torch.where(real, weights.sum(1) + roots.exp(), 1.0)
    return torch.logdet(torch.diag_embed(diagonal) - weights)


def log_partition(arcs, roots, real):
    inside = real[:, :, None] & real[:, None, :]
    weights = arcs.exp() * inside
    diagonal = torch.where(real, weights.sum(1) + roots.exp(), 1.0)
    weights = weights * ~torch.eye(arcs.shape[1], dtype=torch.bool)
    return torch.logdet(torch.diag_embed(diagonal) - weights)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(81 + self.seed)
        return Parser()

    def batch(self):
        g = torch.Generator().manual_seed(82 + self.seed)
        lengths = torch.randint(3, LENGTH + 1, (ROWS,), generator=g)
        heads = torch.full((ROWS, LENGTH), -1)
        for row, length in enumerate(lengths.tolist()):
            order = torch.randperm(length, generator=g)
            for k in range(1, length):
                heads[row, order[k]] = order[int(torch.randint(0, k, (1,), generator=g))]
        return {
            "words": torch.randint(0, WORDS, (ROWS, LENGTH), generator=g),
            "lengths": lengths,
            "heads": heads,
        }

    def partition(self, arcs, roots, real):
        return log_trees(arcs, roots, real)

    def loss_sum(self, model, rows):
        arcs, roots, real = model(rows["words"], rows["lengths"])
        loss = log_trees(arcs, roots, real) - gold_score(arcs, roots, rows["heads"], real)
        return loss.sum(), rows["lengths"].shape[0]

    def distribute(self, model, ctx):
        fully_shard(model.encoder, mesh=ctx.mesh["dp"])
        return fully_shard(model, mesh=ctx.mesh["dp"])

    def step(self, model, batch, ctx):
        rank, world = ctx.coords["dp"], dist.get_world_size(ctx.group("dp"))
        mine = [torch.tensor_split(v, world)[rank] for v in batch.values()]
        for words, lengths, heads in zip(*(torch.tensor_split(v, 2) for v in mine), strict=True):
            arcs, roots, real = model(words, lengths)
            loss = self.partition(arcs, roots, real) - gold_score(arcs, roots, heads, real)
            (loss.sum() * world / ROWS).backward()


class Buggy(Clean):
    def partition(self, arcs, roots, real):
        return log_partition(arcs, roots, real)


EXPECT = dict(
    right=[
        (
            r"self[- ]?(loop|arc|edge|attach|score)|(arc|edge|word).{0,30}(to|with|of) itself|"
            r"own head|"
            r"diagonal (of|entries|score|element|arc|weight|term)|arcs?\[i, ?i\]|i ?== ?j"
        ),
        r"laplacian|column|sum|partition|log-?det|degree|diagonal|matrix[- ]tree|normali[sz]er",
    ],
    place=[
        r"log_partition",
        r"log_trees",
        r"weights\.sum\(1\)",
        r"\bdiagonal\b",
        r"\bpartition\b",
        r"laplacian",
    ],
    wrong=[
        r"padd(ed|ing)",
        r"root.{0,40}(missing|twice|wrong|left out)",
        r"axis|transpos|rows? instead of col|head and (child|dependent).{0,20}(swap|exchang)",
        r"world|divis(or|ion)|micro-?batch|reshard|all-?gather",
    ],
)

WHY = (
    "The Laplacian's diagonal is the sum of the weights of all arcs into a word from other words, "
    "plus the root's. log_partition takes that sum before it removes the diagonal of the arc "
    "weights, so each diagonal entry contains exp(score of the word as its own head). The log "
    "determinant then counts structures in which words hang on themselves, and its gradient "
    "pushes the self-scores and makes the marginals of all other arcs and roots too small. "
    "Gradients of all parameters are wrong (arc, head, child, root, encoder, words); the gold "
    "score, the padding and FSDP's reduction are right. A right cause says that self-arcs are "
    "included in the Laplacian's diagonal sum. The fix is to mask the diagonal before the sum."
)
