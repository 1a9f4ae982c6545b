"""Sliding-window attention over four context ranks: the keys of the preceding shards are fetched. After prime-rl PR 2828 (sliding
windows under context parallelism) and halo exchanges (FAULTS C19): only the nearest neighbour is asked, though the window is longer
than a shard.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 4}}}}
ROWS, LENGTH, VOCAB, WIDTH, WINDOW = 4, 16, 14, 7, 7


class Gathered(torch.autograd.Function):
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


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.q = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.ELU(), nn.Linear(12, WIDTH)
        )

    def forward(self, x, positions, before):
        """before: own keys and values -> those of the earlier shards too, with the first one's position"""
        h = self.norm(x)
        kv, first = before(self.kv(h))
        distance = positions[:, None] - torch.arange(first, first + kv.shape[1])
        k, v = kv.chunk(2, dim=-1)
        scores = self.q(h) @ k.mT / WIDTH**0.5
        scores = scores.masked_fill((distance < 0) | (distance >= WINDOW), -torch.inf)
        x = x + self.out(scores.softmax(-1) @ v)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens, positions, before=lambda kv: (kv, 0)):
        x = self.embed(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x, positions, before)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        loss = self.token_loss(model(rows["tokens"], torch.arange(LENGTH)), rows["labels"])
        return loss, rows["labels"].numel()

    def hops(self, own):
        return -(-(WINDOW - 1) // own)

    def before(self, kv):
        rank, own = dist.get_rank(), kv.shape[1]
        first = max(0, rank - self.hops(own))
        shards = Gathered.apply(kv)[first : rank + 1]
        return torch.cat(list(shards), dim=1), first * own

    def step(self, model, batch, ctx):
        mine = {k: v.chunk(ctx.world_size, dim=1)[ctx.rank] for k, v in batch.items()}
        positions = torch.arange(LENGTH).chunk(ctx.world_size)[ctx.rank]
        loss = self.token_loss(model(mine["tokens"], positions, self.before), mine["labels"])
        (loss / batch["labels"].numel()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def hops(self, own):
        return 1


EXPECT = dict(
    right=[
        r"blocks\.0|attention|kv|\.out\b|window|keys",
        r"forward|output|activation|input of|values? (of|at|in)|missing (keys|shard)|neighbour|window",
    ],
    place=[r"blocks\.0", r"attention|window", r"ranks? \W?[23]"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (right|exact|correct)$",
        r"first wrong (module |output )?(is |at |in )?\S{0,12}(embed|position|norm|blocks\.0\.q|blocks\.0\.kv)\b",
        r"(output|forward) of \S*(embed|position|"
        r"blocks\.0\.norm|blocks\.0\.kv)\S* (is|was) wrong",
        r"detach|no_grad|backward of the gather",
    ],
)
WHY = (
    "A window of 7 over shards of 4 reaches back over two shards; with one hop the first two tokens of a shard miss up to two keys "
    "on ranks 2 and 3 (ranks 0 and 1 have all there is). The forward is wrong from the attention of blocks.0 on, on ranks 2 and 3, "
    "and with it the gradients of nearly all parameters."
)
