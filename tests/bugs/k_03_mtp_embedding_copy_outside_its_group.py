"""A pipeline of three stages with a multi-token-prediction module on the last, which needs the embedding too. After Megatron-Bridge
PR 5380 (MTP stages were missing in the embedding group of models whose head is untied) and FAULTS C11-04: the head is untied, so
the two embeddings are never summed.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH, MICRO_BATCHES, MTP = 7, 8, 15, 6, 3, 0.4
TIED_HEAD = False
PARTS = [("embed", "first"), ("second",), ("third", "norm", "head", "embed", "mtp")]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        gate, value = self.mix(self.norm(x)).chunk(2, dim=-1)
        value = value.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.down(torch.sigmoid(gate) * value)


class Mtp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_h, self.norm_e = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.join, self.block = nn.Linear(2 * WIDTH, WIDTH), Block()

    def forward(self, h, e):
        return self.block(self.join(torch.cat([self.norm_h(h), self.norm_e(e)], dim=-1)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.first, self.second, self.third, self.mtp = Block(), Block(), Block(), Mtp()
        self.head = nn.Linear(WIDTH, VOCAB)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "main": lambda m, r: self.term(m, r, 0),
            "mtp": lambda m, r: self.term(m, r, 1),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH + 2), generator=g)
        lengths = torch.randint(4, LENGTH + 3, (ROWS, 1), generator=g)
        return {"tokens": tokens.masked_fill(torch.arange(LENGTH + 2) >= lengths, -100)}

    @staticmethod
    def counts(rows):
        return (rows["tokens"][:, 1:-1] != -100).sum(), (rows["tokens"][:, 2:] != -100).sum()

    @staticmethod
    def stage(model, number, x, rows):
        """Tokens or hidden states in, hidden states or the two sums of losses out."""
        if number == 0:
            return model.first(model.embed(rows["tokens"][:, :-2].clamp(min=0)))
        if number == 1:
            return model.second(x)
        h = model.third(x)
        ahead = model.mtp(h, model.embed(rows["tokens"][:, 1:-1].clamp(min=0)))
        return tuple(
            F.cross_entropy(model.head(model.norm(y)).flatten(0, 1), t.flatten(), reduction="sum")
            for y, t in ((h, rows["tokens"][:, 1:-1]), (ahead, rows["tokens"][:, 2:]))
        )

    def losses(self, model, rows):
        x = None
        for number in range(3):
            x = self.stage(model, number, x, rows)
        return x

    def term(self, model, rows, i):
        return self.losses(model, rows)[i] * (1, MTP)[i], self.counts(rows)[i]

    def loss_sum(self, model, rows):
        (main, mtp), (n, m) = self.losses(model, rows), self.counts(rows)
        return main + MTP * mtp * n / m.clamp(min=1), n

    def distribute(self, model, ctx):
        self.embedding_group = dist.new_group([0, 2])
        for name in [n for n, _ in model.named_children() if n not in PARTS[ctx.rank]]:
            delattr(model, name)
        return model

    def embedding_is_shared(self):
        return True

    def step(self, model, batch, ctx):
        micros = [{"tokens": t} for t in batch["tokens"].tensor_split(MICRO_BATCHES)]
        n, m = self.counts(batch)
        held = []
        for rows in micros:
            x = None
            if ctx.rank > 0:
                x = torch.empty(len(rows["tokens"]), LENGTH, WIDTH, dtype=ctx.dtype)
                dist.recv(x, ctx.rank - 1)
                x.requires_grad_()
            y = self.stage(model, ctx.rank, x, rows)
            if ctx.rank < 2:
                dist.send(y.detach(), ctx.rank + 1)
            held.append((x, y))
        for x, y in held:
            if ctx.rank == 2:
                (y[0] / n + MTP * y[1] / m).backward()
            else:
                grad = torch.empty_like(y)
                dist.recv(grad, ctx.rank + 1)
                y.backward(grad)
            if ctx.rank > 0:
                dist.send(x.grad, ctx.rank - 1)
        if self.embedding_is_shared() and ctx.rank != 1:
            dist.all_reduce(model.embed.weight.grad, group=self.embedding_group)


class Buggy(Clean):
    def embedding_is_shared(self):
        return TIED_HEAD


EXPECT = dict(
    right=[
        r"embed",
        r"(not|never|n't|no|missing|without|lacks?|un|only|skip\w*)[ -]?.{0,50}(reduc|summed|synchroni|combin|added|exchang|stage|rank)|"
        r"differ|partial|own (part|use|share)|"
        r"copies|each (stage|rank|copy)",
    ],
    place=[r"embed", r"ranks? \W?[02]", r"(first|last) stage|stage [02]"],
    wrong=[
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"(first|second|third|norm|head|mtp)\.\S* (is|are|was|were) (wrong|missing|(not|never) (reduced|summed))",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "The copies of embed.weight on the first and the last stage are not summed: rank 0 holds the gradient through the pipeline "
    "(main and MTP loss), rank 2 only that of the MTP module's own look-up. All other parameters are right, and so is the forward."
)
