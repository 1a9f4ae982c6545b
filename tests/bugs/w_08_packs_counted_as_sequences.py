"""Supervised fine-tuning with a loss per sequence (mean over its tokens, then mean over sequences) under HSDP (FSDP2, two replicas of two shards). Each rank packs its sequences into rows of a token budget, with attention and positions that stay
within a sequence. After the reports on sample-level losses and `num_items` / batch size with packing (ms-swift, verl, axolotl): after packing a row is no sequence any more.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"replicate": 2, "shard": 2}}}}
VOCABULARY, WIDTH, HEADS, BUDGET = 29, 12, 3, 10
LENGTHS = [4, 5, 3, 8, 2, 6, 4, 7, 5, 3, 2, 6, 3]  # four sequences on rank 0, three on the others
ROWS, LENGTH = len(LENGTHS), max(LENGTHS)
NOTHING = -1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.norm2, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 19),
            nn.Linear(19, WIDTH),
        )

    def forward(self, x, seen):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen[:, None], -1e9)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, places, segments):
        n = ids.shape[1]
        seen = (segments[:, :, None] == segments[:, None, :]) & torch.ones(
            n, n, dtype=torch.bool
        ).tril()
        x = self.embed(ids) + self.place(places)
        for block in self.blocks:
            x = block(x, seen)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "length": torch.tensor(LENGTHS),
        }

    @staticmethod
    def mean_per_sequence(logits, labels, share):
        """`share`: 1 / length of the token's sequence, 0 at padding."""
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (each * share.flatten()).sum()

    def loss_sum(self, model, rows):
        places = torch.arange(LENGTH).expand_as(rows["ids"])
        logits = model(rows["ids"], places, torch.zeros_like(places))
        share = (places < rows["length"][:, None]) / rows["length"][:, None].to(logits.dtype)
        return self.mean_per_sequence(logits, rows["labels"], share), len(rows["ids"])

    def distribute(self, model, ctx):
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    @staticmethod
    def packed(rows, dtype):
        """Sequence after sequence, a new row where the budget would be exceeded."""
        packs, room = [], 0
        for i, n in enumerate(rows["length"].tolist()):
            if n > room:
                packs.append([])
                room = BUDGET
            packs[-1].append(i)
            room -= n
        out = {
            k: torch.zeros(len(packs), BUDGET, dtype=torch.long)
            for k in ("ids", "labels", "places")
        }
        out["segments"] = torch.full((len(packs), BUDGET), NOTHING)
        out["share"] = torch.zeros(len(packs), BUDGET, dtype=dtype)
        for p, members in enumerate(packs):
            at = 0
            for i in members:
                n = int(rows["length"][i])
                where = slice(at, at + n)
                out["ids"][p, where], out["labels"][p, where] = (
                    rows["ids"][i, :n],
                    rows["labels"][i, :n],
                )
                out["places"][p, where], out["segments"][p, where] = torch.arange(n), i
                out["share"][p, where] = 1 / torch.tensor(n, dtype=dtype)
                at += n
        return out

    def number(self, mine, packs):
        return torch.tensor(len(mine["ids"]))

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        packs = self.packed(mine, ctx.dtype)
        number = self.number(mine, packs)
        dist.all_reduce(number, group=ctx.group("replicate", "shard"))
        logits = model(packs["ids"], packs["places"], packs["segments"])
        (self.mean_per_sequence(logits, packs["labels"], packs["share"]) / number).backward()


class Buggy(Clean):
    def number(self, mine, packs):
        return torch.tensor(len(packs["ids"]))


EXPECT = dict(
    right=[
        r"13 ?/ ?9|1\.44|\b9\b.{0,120}\b13\b|\b13\b.{0,120}\b9\b",
        r"loss|divi|count|number|normali|factor|times|denominator",
    ],
    place=[r"loss|divi|count|factor|every|all (parameters|gradients)|scale|times"],
    wrong=[
        r"forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(is|are|was|were) (never|not) (been )?(all.?)?reduced|missing all.?reduc|reduced (twice|again)|counted (twice|again)",
        r"each rank divides? by (its|their) own|mean of (the )?means",
        r"backward of \S+ is wrong|gradient of other targets",
        r"rows? .{0,20}(never read|read twice)|tokens? .{0,20}(lost|missing)",
        r"over the (shards?|replicas?) only|too few ranks",
    ],
)
WHY = (
    "The divisor is the number of packed rows of all ranks (9: three on rank 0, two on each other), not the number of sequences (13). The loss is a sum of per-sequence means, so it must be divided by the sequences. Every gradient on every rank is 13/9 = 1.444 times the right one; "
    "the number is reduced over all four ranks in both cases, forward, token weights (1 / own length), targets, attention within the packs and FSDP's reductions are right."
)
