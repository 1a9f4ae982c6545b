"""A causal linear-attention language model with the sequence cut over ranks: each rank sends the key-value state of its chunk, and the sum
of the states before a chunk is its starting state. After LASP and flash-linear-attention's context-parallel issues (inclusive and exclusive
prefix) and FAULTS C19: the prefix is taken up to and including the own chunk.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
ROWS, LENGTH, WORDS, WIDTH, HEADS = 4, 13, 17, 8, 2


class States(torch.autograd.Function):
    """The states of all chunks; each rank uses them for its own tokens."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad[dist.get_rank()]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 12),
            nn.Linear(12, WIDTH),
        )

    def forward(self, x, before):
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        q, k = F.elu(q) + 1, F.elu(k) + 1
        mixed = (q @ k.mT).tril() @ v + q @ before(k.mT @ v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2) / WIDTH)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layers = (
            nn.Embedding(WORDS, WIDTH),
            nn.ModuleList(Layer() for _ in range(2)),
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words, before):
        x = self.words(words)
        for layer in self.layers:
            x = layer(x, before)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return LanguageModel()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        words = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(6, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "words": words[:, :-1],
            "next": words[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    @staticmethod
    def token_loss(logits, rows):
        return F.cross_entropy(logits.flatten(0, 1), rows["next"].flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.token_loss(model(rows["words"], torch.zeros_like), rows), (
            rows["next"] != -100
        ).sum()

    def chunks_before(self, rank):
        return slice(0, rank)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size, dim=1)[ctx.rank] for k, v in batch.items()}

        def before(state):
            return States.apply(state)[self.chunks_before(ctx.rank)].sum(0)

        loss = self.token_loss(model(mine["words"], before), mine)
        (loss / (batch["next"] != -100).sum()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def chunks_before(self, rank):
        return slice(0, rank + 1)


EXPECT = dict(
    right=[
        r"forward|output|activation|values? (of|at|in)|input of",
        r"layers\.0|\bout\b|attention|prefix|state|mix|sequence",
    ],
    place=[r"layers\.0", r"\bout\b", r"(all|every|each) ranks?|ranks? \W?[012]"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times) .{0,30}gradient|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (right|exact|correct)",
        r"first wrong .{0,20}(words|head|qkv|layers\.0\.norm\b|layers\.1)",
        r"(rank \W?0|first rank|first chunk) .{0,30}(is|was) (right|exact|correct)",
    ],
)
WHY = (
    "The starting state of each chunk contains the chunk itself, so every token sees all tokens of its own chunk, later ones too, and "
    "the earlier ones twice. The forward is wrong from the input of layers.0.out on, on all three ranks (rank 0 too), and with it the "
    "gradients of all parameters."
)
