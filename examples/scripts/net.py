"""The model of these scripts: small, odd sizes, a bit of everything that people train."""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH = 29, 12


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, vocabulary=VOCABULARY, width=WIDTH, depth=3):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def batch_of(seed, step, rows=12, length=7):
    """The rows of a step, the same for everybody who asks."""
    g = torch.Generator().manual_seed(1000 * seed + step)
    return tuple(torch.randint(VOCABULARY, (rows, length), generator=g) for _ in range(2))


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
