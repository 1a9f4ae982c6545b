"""A gated linear recurrence under context parallelism: the state goes from rank to rank. After
FAULTS class C19 (shard-local state; reports on linear attention sequence parallelism): right on
two ranks, from the third on the earlier ranks are forgotten.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collective
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}

ROWS, LENGTH, WIDTH, STATE, VOCABULARY = 7, 9, 8, 6, 11


class Recurrence(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(WIDTH, STATE)
        self.gate = nn.Linear(WIDTH, STATE)
        self.decay = nn.Parameter(torch.linspace(1.0, 3.0, STATE))
        self.out = nn.Linear(STATE, WIDTH, bias=False)

    def scan(self, u, decay):
        h, states = torch.zeros_like(u[:, 0]), []
        for t in range(u.shape[1]):
            h = decay * h + u[:, t]
            states.append(h)
        return torch.stack(states, 1)

    def forward(self, x, carry=None):
        u, decay = self.inputs(x), self.decay.sigmoid()
        states = self.scan(u, decay)
        if carry is not None:
            steps = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
            before = carry(states[:, -1], decay ** x.shape[1])
            states = states + decay**steps * before[:, None]
        return self.out(F.silu(self.gate(x)) * states)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.mixer = nn.LayerNorm(WIDTH), Recurrence()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 13), nn.GELU(), nn.Linear(13, WIDTH))

    def forward(self, x, carry):
        x = x + self.mixer(self.norm1(x), carry)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, carry=None):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, carry)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].clone()}

    def loss_sum(self, model, rows, carry=None):
        logits, labels = model(rows["ids"], carry).flatten(0, 1), rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()

    def state_before(self, finals, decay, rank):
        """The state at the start of this rank's tokens, from the last states of all ranks."""
        before = torch.zeros_like(finals[0])
        for final in finals[:rank]:
            before = decay * before + final
        return before

    def step(self, model, batch, ctx):
        group, rank = ctx.group("cp"), ctx.coords["cp"]
        mine = {k: v.chunk(ctx.axes["cp"], dim=1)[rank] for k, v in batch.items()}

        def carry(final, decay):
            finals = collective.all_gather(final.contiguous(), group)
            return self.state_before(finals, decay, rank) + 0 * sum(finals)

        loss, _ = self.loss_sum(model, mine, carry)
        (loss / (ROWS * LENGTH)).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=group)


class Buggy(Clean):
    def state_before(self, finals, decay, rank):
        return finals[rank - 1] if rank else torch.zeros_like(finals[0])


EXPECT = dict(
    right=[
        r"forward|output|activation|state|carry|recurren|context|earlier|previous",
        r"mixer|recurren|blocks\.0",
    ],
    place=[r"blocks\.0", r"mixer", r"rank 2|ranks? \[?2|coordinate 2|cp ?[=:] ?2"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|two times|2 times)|reduced (twice|again)",
        r"averag",
        r"labels? (are|is) (shifted|wrong)",
    ],
)

WHY = (
    "Each rank starts from the last state of the rank before it alone, which was computed from "
    "zero: on rank 2 the tokens of rank 0 are forgotten in every mixer, ranks 0 and 1 get the "
    "right forward in the first block."
)
