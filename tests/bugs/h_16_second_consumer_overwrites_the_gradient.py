"""Three pools: an encoder (two ranks) feeds a captioner (two ranks) and a tagger (one), each of which sends the gradient of the features
back. After the reports on heterogeneous pipelines (NeMo Megatron-Bridge's MIMO, several consumers of one stage's output; FAULTS C03-07,
C12): the gradient that comes last replaces the one that came first.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {
    "pools": {
        "encoder": {"axes": {"dp": 2}},
        "captioner": {"axes": {"dp": 2}},
        "tagger": {"axes": {"dp": 1}},
    }
}
ROWS, PATCHES, PIXELS, WIDTH, WORDS, LENGTH, TAGS = 11, 4, 6, 7, 13, 5, 6
CONSUMERS = "captioner", "tagger"


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.norm = nn.Linear(PIXELS, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x):
        x = self.patch(x)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Captioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.start = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cell, self.out = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WORDS)

    def forward(self, features, words):
        state = torch.tanh(self.start(features.mean(1)))
        return self.out(self.cell(self.words(words), state[None])[0])


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.weigh, self.out = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, TAGS)

    def forward(self, features):
        return self.out((self.weigh(features).softmax(1) * features).sum(1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.captioner, self.tagger = Encoder(), Captioner(), Tagger()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            name: lambda m, rows, name=name: self.term(m, m.encoder(rows["image"]), rows, name)
            for name in CONSUMERS
        }

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        words = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "image": torch.randn(ROWS, PATCHES, PIXELS, generator=g),
            "words": words[:, :-1].contiguous(),
            "labels": words[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
            "tags": torch.rand(ROWS, TAGS, generator=g) < 0.4,
        }

    @staticmethod
    def term(model, features, rows, name):
        if name == "captioner":
            logits = model.captioner(features, rows["words"]).mT
            return F.cross_entropy(logits, rows["labels"], reduction="sum"), (
                rows["labels"] != -100
            ).sum()
        logits = model.tagger(features)
        tags = rows["tags"].to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, tags, reduction="none").mean(
            1
        ).sum(), len(tags)

    def loss_sum(self, model, rows):
        features, n = model.encoder(rows["image"]), len(rows["image"])
        terms = [self.term(model, features, rows, name) for name in CONSUMERS]
        return n * sum(value / count for value, count in terms), n

    def distribute(self, model, ctx):
        for pool in ctx.pools:
            if pool != ctx.pool:
                delattr(model, pool)
        return model

    @staticmethod
    def rows_of(rank, ctx):
        ranks = next(r for r in ctx.pools.values() if rank in r)
        part = torch.arange(ROWS).tensor_split(len(ranks))[list(ranks).index(rank)].tolist()
        return part[0], part[-1] + 1

    def shared_with(self, pool, ctx):
        """The ranks of the other pool with rows in common, and these rows, counted from my first."""
        start, end = self.rows_of(ctx.rank, ctx)
        for rank in ctx.pools[pool]:
            a, b = self.rows_of(rank, ctx)
            if max(a, start) < min(b, end):
                yield rank, slice(max(a, start) - start, min(b, end) - start)

    def accept(self, grad, got):
        grad += got

    def encode(self, encoder, rows, ctx):
        features = encoder(rows["image"])
        for pool in CONSUMERS:
            for rank, part in self.shared_with(pool, ctx):
                dist.send(features[part].detach().contiguous(), rank)
        grad = torch.zeros_like(features)
        for pool in CONSUMERS:
            for rank, part in self.shared_with(pool, ctx):
                got = torch.empty_like(grad[part])
                dist.recv(got, rank)
                self.accept(grad[part], got)
        features.backward(grad)

    def consume(self, model, rows, total, ctx):
        features = torch.empty(len(rows["image"]), PATCHES, WIDTH, dtype=ctx.dtype)
        for rank, part in self.shared_with("encoder", ctx):
            dist.recv(features[part], rank)
        loss, _ = self.term(model, features.requires_grad_(), rows, ctx.pool)
        (loss / total).backward()
        for rank, part in self.shared_with("encoder", ctx):
            dist.send(features.grad[part].contiguous(), rank)

    def step(self, model, batch, ctx):
        start, end = self.rows_of(ctx.rank, ctx)
        rows = {k: v[start:end] for k, v in batch.items()}
        if ctx.pool == "encoder":
            self.encode(model.encoder, rows, ctx)
        else:
            total = (batch["labels"] != -100).sum() if ctx.pool == "captioner" else ROWS
            self.consume(model, rows, total, ctx)
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def accept(self, grad, got):
        grad.copy_(got)


EXPECT = dict(
    right=[
        r"encoder",
        r"caption",
        r"missing|lack|lost|loses?|dropped|overwrit|replac|absent|without|not (reach|arriv|contain|includ|receiv)|no gradient|never|"
        r"only (the )?tag|zero|no part|left out|none of|\b0\b|misses",
    ],
    place=[r"encoder", r"caption", r"ranks? \W?[01]\b"],
    wrong=[
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"(captioner|tagger)\.\S* (is|are|has|have) (a )?wrong",
        r"(tags?|tagger)( term| loss)?\S* (is|are|was|were) (missing|lost|dropped|absent)",
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"mean of (the )?(rank |ranks' )?means",
    ],
)
WHY = (
    "On the encoder's ranks the tagger's gradient of the features is written over the captioner's, so encoder.* has no gradient of the "
    "captioner's loss, on ranks 0 and 1. The gradients of the captioner and of the "
    "tagger, the tagger's part of the encoder's gradient and the forward are right."
)
