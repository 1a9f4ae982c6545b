"""A bidirectional encoder (masked language model) with ring attention: keys and values travel, blocks of padding are masked. After
ring-flash-attention issues on padded batches and varlen inputs, and FAULTS C19 (a mask of the shard used for another's tokens): the key
padding mask does not travel with the keys.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, LENGTH, WORDS, WIDTH, HEADS = 5, 12, 15, 8, 2


def shift(x, step):
    world, rank = dist.get_world_size(), dist.get_rank()
    received = torch.empty_like(x)
    ops = [
        dist.P2POp(dist.isend, x.contiguous(), (rank + step) % world),
        dist.P2POp(dist.irecv, received, (rank - step) % world),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


class Pass(torch.autograd.Function):
    """On to the next rank of the ring; the gradient goes back."""

    @staticmethod
    def forward(ctx, x):
        return shift(x, 1)

    @staticmethod
    def backward(ctx, grad):
        return shift(grad, -1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.q = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 11),
            nn.Linear(11, WIDTH),
        )

    def forward(self, x, real, ring):
        x_ = self.norm(x)
        q = self.q(x_).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        scores, values = [], []
        for kv, there in ring(self.kv(x_), real):
            k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in kv.chunk(2, -1))
            block = q @ k.mT / (WIDTH // HEADS) ** 0.5
            scores.append(block.masked_fill(~there[:, None, None], -1e4))
            values.append(v)
        mixed = torch.cat(scores, -1).softmax(-1) @ torch.cat(values, 2)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(WIDTH, WORDS)

    def forward(self, rows, places, ring=lambda kv, real: [(kv, real)]):
        x = self.words(rows["words"]) + self.places(places)
        for layer in self.layers:
            x = layer(x, rows["real"], ring)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Encoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        real = torch.arange(LENGTH) < torch.tensor([12, 5, 9, 3, 7])[:, None]
        hidden = real & (torch.rand(ROWS, LENGTH, generator=g) < 0.5)
        hidden[:, 0] = True
        words = torch.randint(1, WORDS, (ROWS, LENGTH), generator=g)
        return {
            "words": words.masked_fill(hidden, 0),
            "guess": words.masked_fill(~hidden, -100),
            "real": real,
        }

    @staticmethod
    def token_loss(logits, rows):
        return F.cross_entropy(logits.flatten(0, 1), rows["guess"].flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.token_loss(model(rows, torch.arange(LENGTH)), rows), (
            rows["guess"] != -100
        ).sum()

    def next_mask(self, real):
        return shift(real.to(torch.uint8), 1).bool()

    def ring(self, kv, real):
        for turn in range(dist.get_world_size()):
            if turn:
                kv, real = Pass.apply(kv), self.next_mask(real)
            yield kv, real

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size, dim=1)[ctx.rank] for k, v in batch.items()}
        places = torch.arange(LENGTH).tensor_split(ctx.world_size)[ctx.rank]
        loss = self.token_loss(model(mine, places, self.ring), mine)
        (loss / (batch["guess"] != -100).sum()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def next_mask(self, real):
        return real


EXPECT = dict(
    right=[
        r"forward|output|activation|values? (of|at|in)|input of",
        r"layers\.0|\bout\b|attention|mask|padding|ring|mix",
    ],
    place=[r"layers\.0", r"\bout\b", r"(all|every|each) ranks?|ranks? \W?[012]"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (right|exact|correct)",
        r"first wrong .{0,20}(words|places|head|layers\.0\.(norm|q|kv)\b|layers\.1)",
        r"backward .{0,40}(only|alone) .{0,20}wrong",
    ],
)
WHY = (
    "Each rank masks the keys that arrive from the others with the padding of its own positions: rank 0 sees padding of later chunks "
    "as words, the later ranks hide real words of earlier chunks. The forward is wrong from the input of layers.0.out on, on all "
    "ranks, and with it the gradients of all parameters."
)
