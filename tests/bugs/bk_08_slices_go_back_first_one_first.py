"""A causal two-block language model on two pipeline stages, data parallel by two (3 and 2 of five rows), pipelined along the sequence: the seven tokens go through the stages in slices of 3, 2 and 2. A
slice attends to the kept keys and values of the slices before it. These are leaves: what later slices hand back to them lies in their .grad until the backward of their own slice takes it to the
projections.

The bug: the backward takes the slices in the order of the forward, the first one first, so that keys and values go back before the later slices have handed anything back to them. After token-level
pipelines (TeraPipe; the sequence-chunked schedules Seq1F1B and SlimPipe and their ports), in which the backward of the slices has to be last in, first out.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 2}}}}
WORDS, WIDTH, HEADS, LENGTH, ROWS = 11, 6, 2, 7, 5
SLICES = [(0, 3), (3, 5), (5, 7)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH))

    def keys_values(self, x):
        return self.kv(self.norm1(x))

    def forward(self, x, kv):
        """x: the tokens that ask, the last ones of those in kv."""
        q = self.query(self.norm1(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in kv.chunk(2, -1))
        own = torch.arange(kv.shape[1] - x.shape[1], kv.shape[1])
        later = torch.arange(kv.shape[1])[None, :] > own[:, None]
        scores = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).masked_fill(later, float("-inf"))
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def enter(self, ids, first):
        return self.words(ids) + self.places(torch.arange(first, first + ids.shape[1]))

    def score(self, x, labels):
        return F.cross_entropy(
            self.head(self.norm(x)).flatten(0, 1), labels.flatten(), reduction="sum"
        )

    def forward(self, ids, labels):
        x = self.enter(ids, 0)
        for block in self.blocks:
            x = block(x, block.keys_values(x))
        return self.score(x, labels)

    def keep_stage(self, stage):
        self.blocks[1 - stage] = nn.Identity()
        if stage == 0:
            self.norm, self.head = nn.Identity(), nn.Identity()
        else:
            self.words, self.places = nn.Identity(), nn.Identity()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def loss_sum(self, model, rows):
        return model(rows["ids"], rows["labels"]), rows["labels"].numel()

    def distribute(self, model, ctx):
        model.keep_stage(ctx.coords["pp"])
        return model

    def way_back(self, count):
        return reversed(range(count))

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        stage, group = ctx.coords["pp"], ctx.group("pp")
        other = dist.get_global_rank(group, 1 - stage)
        block, count = model.blocks[stage], batch["labels"].numel()
        entered, made, kept, results = [], [], [], []
        for low, high in SLICES:
            if stage == 0:
                x = model.enter(mine["ids"][:, low:high], low)
            else:
                x = torch.empty(len(mine["ids"]), high - low, WIDTH, dtype=block.out.weight.dtype)
                dist.recv(x, other, group=group)
                x.requires_grad_()
            made.append(block.keys_values(x))
            kept.append(made[-1].detach().requires_grad_())
            y = block(x, torch.cat(kept, 1))
            if stage == 0:
                dist.send(y.detach().contiguous(), other, group=group)
            else:
                y = model.score(y, mine["labels"][:, low:high]) / count
            entered.append(x)
            results.append(y)
        for n in self.way_back(len(SLICES)):
            grad = None
            if stage == 0:
                grad = torch.empty_like(results[n])
                dist.recv(grad, other, group=group)
            results[n].backward(grad, retain_graph=True)
            made[n].backward(kept[n].grad)
            if stage == 1:
                dist.send(entered[n].grad.contiguous(), other, group=group)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def way_back(self, count):
        return range(count)


EXPECT = dict(
    right=[
        r"keys?|values?|\bkv\b|keys_values|slices?|chunks?|kept|leaf|leaves|norm1|attention|earlier|later",
        r"gradient|backward|lost|missing|handed back|dropped|order|too early|detach|not (all|whole)|part",
    ],
    place=[r"\bkv\b", r"keys_values", r"slice", r"\bkept\b", r"norm1", r"blocks"],
    wrong=[
        r"forward .{0,20}(is|are) wrong",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"not (been )?(all.?)?reduced|reduced (twice|again)",
        r"(gradients? of )?head\.?\w*.{0,20}(is|are) wrong|only (rank|stage) (0|1) is wrong",
    ],
)
WHY = (
    "The backward runs over slices 0, 1, 2 and not 2, 1, 0, on both stages and both replicas. When the keys and values of slice 0 are taken back (made[0].backward(kept[0].grad)), kept[0].grad has slice 0's "
    "own part only; the parts from slices 1 and 2 come later and are never used; of slice 1 the part from slice 2 is lost; slice 2 is right. On stage 1 blocks.1.kv and norm1 are wrong, and so is what is "
    "sent back for slices 0 and 1; on stage 0 everything is wrong by that and again by its own loss in blocks.0. Right: the forward, the losses, head, norm, and on stage 1 query, out, mlp, norm2; divisor "
    "35; the sum over dp. Fix: last slice first."
)
