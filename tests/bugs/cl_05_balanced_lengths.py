"""Instruction tuning of a small gated convolutional language model under FSDP2 (fully_shard for
each block and the root) over three ranks. Twelve answers of unlike length are ordered by length
and dealt out to and fro (0 1 2 2 1 0 ...), so that each rank has four rows and about as many
tokens; micro-batches of two rows, padded to their own longest.

Bug: the order is made with lengths.index(n) for the sorted lengths: rows of the same length are
all found as the first of them. It is trained several times, the others never. After
length-balancing code for sequence packing in fine-tuning recipes.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, T, VOCAB, D = 12, 9, 13, 7
LENGTHS = (4, 7, 9, 4, 3, 7, 5, 8, 4, 2, 7, 6)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.mix = nn.Conv1d(D, 2 * D, 3)
        self.out = nn.Linear(D, D)

    def forward(self, x):
        h = F.pad(self.norm(x).transpose(1, 2), (2, 0))
        return x + self.out(F.glu(self.mix(h), 1).transpose(1, 2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(D, VOCAB)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 55)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 550)
        lengths = torch.tensor(LENGTHS)[torch.randperm(ROWS, generator=g)]
        ids = torch.randint(1, VOCAB, (ROWS, T + 1), generator=g)
        return {"ids": ids, "length": lengths}

    def loss_sum(self, model, rows):
        width = int(rows["length"].max())
        ids, wanted = rows["ids"][:, :width], rows["ids"][:, 1 : width + 1]
        losses = F.cross_entropy(model(ids).flatten(0, 1), wanted.flatten(), reduction="none")
        answered = torch.arange(width)[None] < rows["length"][:, None]
        return (losses * answered.flatten()).sum(), rows["length"].sum()

    def distribute(self, model, ctx):
        mesh = init_device_mesh("cpu", (ctx.axes["dp"],))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def by_length(self, lengths):
        return sorted(range(len(lengths)), key=lambda row: lengths[row], reverse=True)

    def own_rows(self, lengths, rank, ranks):
        order = self.by_length(lengths.tolist())
        rounds = [order[a : a + ranks] for a in range(0, len(order), ranks)]
        return [part[::-1][rank] if i % 2 else part[rank] for i, part in enumerate(rounds)]

    def step(self, model, batch, ctx):
        ranks = ctx.axes["dp"]
        own = self.own_rows(batch["length"], ctx.coords["dp"], ranks)
        total = batch["length"].sum()
        for i in range(0, len(own), 2):
            rows = {k: v[own[i : i + 2]] for k, v in batch.items()}
            loss, _ = self.loss_sum(model, rows)
            (loss * ranks / total).backward()


class Buggy(Clean):
    def by_length(self, lengths):
        return [lengths.index(n) for n in sorted(lengths, reverse=True)]


EXPECT = dict(
    right=[
        r"row|sample|example|sequence",
        r"twice|several times|repeat|duplicat|more than once|\b(2|3|two|three) times|never|missing|"
        r"left out|not (read|trained|seen|used)|other rows|coefficient|instead of",
        r"row|same length|equal length|tie|index\(|by_length|own_rows|lengths?",
    ],
    place=[r"by_length", r"own_rows", r"lengths\.index", r"sorted\(lengths", r"rows? \[?\d"],
    wrong=[
        r"(loss|gradient).{0,40}(divided|scaled|multiplied) by (the )?(world|ranks|dp|3)",
        r"fully_shard.{0,40}(wrong|missing|twice)",
        r"padd(ing|ed).{0,40}(count|in the loss|trained)",
        r"token (count|total).{0,40}(wrong|local|own)",
        r"every rank (reads|has|trains).{0,20}same rows",
    ],
)
WHY = """Buggy.by_length maps each sorted length back to a row with lengths.index(n), which always
gives the first row of that length: of the three rows of length 4 (and of length 7) the first is
trained three times, the other two never. The number of tokens stays the same, so divisor and
scales are right. A right cause says that some rows are trained several times and others not at
all (the row order / own_rows). Fix: sorted(range(n), key=lengths.__getitem__, reverse=True)."""
