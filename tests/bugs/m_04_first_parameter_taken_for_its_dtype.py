"""Gradients of a recurrent tagger packed into one flat buffer, summed over the ranks and copied back, ZeRO-1 style: each rank owns a piece.
After the flat reductions of fairseq's LegacyDistributedDataParallel and FAULTS C08 (the reduction does not see what it should):
the parameters are a generator, and its first element is taken to learn the dtype.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WORDS, WIDTH, TAGS = 11, 6, 19, 7, 5


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.forward_rnn = nn.GRUCell(WIDTH, 9)
        self.backward_rnn = nn.GRUCell(WIDTH, 9)
        self.norm, self.tags = nn.LayerNorm(18), nn.Linear(18, TAGS)
        self.reserved = nn.Parameter(torch.ones(3), requires_grad=False)

    def run(self, cell, x):
        h, states = x.new_zeros(len(x), 9), []
        for t in range(x.shape[1]):
            h = cell(x[:, t], h)
            states.append(h)
        return torch.stack(states, 1)

    def forward(self, words):
        x = self.words(words)
        there, back = self.run(self.forward_rnn, x), self.run(self.backward_rnn, x.flip(1)).flip(1)
        return self.tags(self.norm(torch.cat([there, back], -1)))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Tagger()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        tags = torch.randint(TAGS, (ROWS, LENGTH), generator=g)
        return {
            "words": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
            "tags": tags.masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    def loss_sum(self, model, rows):
        logits, tags = model(rows["words"]).flatten(0, 1), rows["tags"].flatten()
        return F.cross_entropy(logits, tags, reduction="sum"), (tags != -100).sum()

    def trainable(self, model):
        return (p for p in model.parameters() if p.requires_grad)

    def to_reduce(self, model):
        """(dtype of the flat buffer, its parameters)"""
        return next(self.trainable(model)).dtype, list(self.trainable(model))

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, count = self.loss_sum(model, mine)
        dist.all_reduce(count)
        (loss / count).backward()
        dtype, params = self.to_reduce(model)
        flat = torch.cat([p.grad.flatten() for p in params]).to(dtype)
        flat = F.pad(flat, (0, -len(flat) % ctx.world_size))
        for owner, piece in enumerate(flat.chunk(ctx.world_size)):
            dist.reduce(piece, owner)
            dist.broadcast(piece, owner)
        sizes = [p.numel() for p in params]
        for param, grad in zip(params, flat[: sum(sizes)].split(sizes)):
            param.grad.copy_(grad.view_as(param))


class Buggy(Clean):
    def to_reduce(self, model):
        params = self.trainable(model)
        return next(params).dtype, list(params)


EXPECT = dict(
    right=[
        r"words",
        r"(not|never|n't|no|missing|without|lacks?|un|skip\w*|left|only|outside)[ -]?.{0,50}(reduc|summed|synchroni|averag|"
        r"combin|own rows|shared between)|"
        r"differ\w*|partial|own (rows|share|part)|local",
    ],
    place=[r"words"],
    wrong=[
        r"(forward_rnn|backward_rnn|norm|tags)\S* (is|are|has|have) (a )?wrong",
        r"(reduced|counted|summed) (twice|again)",
        r"mean of (the )?means",
        r"forward (pass )?(is|was) wrong",
        r"(all|every) parameters? (is|are) (wrong|not reduced)",
        r"shifted|wrong (place|offset|slice)",
    ],
)
WHY = (
    "next() takes the first parameter out of the generator, so words.weight is not in the flat buffer and is never reduced: each rank "
    "keeps the gradient of its own rows there. All other gradients are right."
)
