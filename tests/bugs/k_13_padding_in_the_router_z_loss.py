"""A mixture of experts under HSDP (FSDP2), rows padded on the right. After FAULTS C10-12 (Megatron-LM issue 1617, padding in the
balance loss) and transformers' `load_balancing_loss_func`, which got an attention mask for the same reason: the z-loss of the
router is the mean over padding tokens too.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"replicate": 2, "shard": 2}}}}
ROWS, LENGTH, VOCAB, WIDTH, EXPERTS, Z = 11, 7, 18, 6, 3, 0.2


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.past = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up, self.down = (
            nn.Linear(WIDTH, 8 * EXPERTS),
            nn.Parameter(torch.randn(EXPERTS, 8, WIDTH) / 3),
        )

    def forward(self, x):
        x = x + self.past(x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])
        h = self.norm(x)
        logits = self.router(h)
        y = F.gelu(self.up(h)).unflatten(-1, (EXPERTS, 8))
        y = torch.einsum("bleh,ehw,ble->blw", y, self.down, logits.softmax(-1))
        return x + y, logits.logsumexp(-1).square()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x, z = self.embed(tokens), 0.0
        for layer in self.layers:
            x, squares = layer(x)
            z = z + squares
        return self.head(x), z


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"lm": lambda m, r: self.term(m, r, 0), "z": lambda m, r: self.term(m, r, 1)}

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(1, VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(3, LENGTH + 2, (ROWS, 1), generator=g)
        return {"tokens": tokens.masked_fill(torch.arange(LENGTH + 1) >= lengths, 0)}

    @staticmethod
    def losses(model, rows):
        """The sum of the next-token losses; the z-loss of every position; which positions are no padding."""
        tokens, labels = rows["tokens"][:, :-1], rows["tokens"][:, 1:]
        logits, z = model(tokens)
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=0
        )
        return loss, z, tokens != 0

    def term(self, model, rows, i):
        loss, z, real = self.losses(model, rows)
        return ((loss, (rows["tokens"][:, 1:] != 0).sum()), (Z * (z * real).sum(), real.sum()))[i]

    def loss_sum(self, model, rows):
        (loss, n), (z, m) = self.term(model, rows, 0), self.term(model, rows, 1)
        return loss + z * n / m, n

    def distribute(self, model, ctx):
        for part in (*model.layers, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def counted(self, real):
        return real

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, z, real = self.losses(model, mine)
        real = self.counted(real)
        counts = torch.stack([(mine["tokens"][:, 1:] != 0).sum(), real.sum()])
        dist.all_reduce(counts)
        (loss / counts[0] + Z * (z * real).sum() / counts[1]).backward()


class Buggy(Clean):
    def counted(self, real):
        return torch.ones_like(real)


EXPECT = dict(
    right=[
        r"\bz\b|z.?loss|router",
        r"weigh|coefficient|normali[sz]|divi|count|mask|padd|rows|positions|tokens|differ|other|scale",
    ],
    place=[r"\bz\b|z.?loss", r"router"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"(lm|language) (term|loss) .{0,20}(wrong|scaled|missing|twice)",
        r"head\.\S* (is|are|was|were) (wrong|missing)",
        r"\bz (term|loss)? ?(is|was) (dropped|missing|lost)|detach",
    ],
)
WHY = (
    "The z-loss is the mean over all positions instead of those that are no padding: padded positions have a weight and the others "
    "one that is too small. Wrong are the routers and all before them (not head, not the last layer's up and down), on all ranks; "
    "the language-model term and the forward are right."
)
