"""DPO with per-answer log-probabilities against a reference model, some pairs filtered out, DDP.
After TRL reports: each rank divides by the pairs it has left."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WIDTH, VOCAB, BETA = 10, 4, 8, 12, 0.5


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        x = x + self.recur(x)
        return self.lm_head(self.norm(x))

    def recur(self, x):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            gates = F.linear(x[:, t], self.mix.weight_ih_l0, self.mix.bias_ih_l0)
            state = F.linear(h, self.mix.weight_hh_l0, self.mix.bias_hh_l0)
            (a, b, c), (d, e, f) = gates.chunk(3, -1), state.chunk(3, -1)
            z = torch.sigmoid(b + e)
            h = z * h + (1 - z) * torch.tanh(c + torch.sigmoid(a + d) * f)
            out.append(h)
        return torch.stack(out, dim=1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        shape = (ROWS, LENGTH + 1)
        return {
            "chosen": torch.randint(VOCAB, shape, generator=g),
            "rejected": torch.randint(VOCAB, shape, generator=g),
            "reference": torch.randn(ROWS, generator=g),
            "keep": torch.tensor([1, 0, 0, 1, 1, 1, 1, 0, 1, 1]),
        }

    @staticmethod
    def log_prob(model, ids):
        log_p = model(ids[:, :-1]).log_softmax(-1)
        return log_p.gather(-1, ids[:, 1:, None])[..., 0].sum(-1)

    def loss_sum(self, model, rows):
        margin = self.log_prob(model, rows["chosen"]) - self.log_prob(model, rows["rejected"])
        loss = -F.logsigmoid(BETA * (margin - rows["reference"]))
        return (loss * rows["keep"]).sum(), rows["keep"].sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        ids = torch.cat([mine["chosen"], mine["rejected"]])  # one pass for both
        log_p = model(ids[:, :-1]).log_softmax(-1)
        log_p = log_p.gather(-1, ids[:, 1:, None])[..., 0].sum(-1)
        chosen, rejected = log_p.chunk(2)
        loss = -F.logsigmoid(BETA * (chosen - rejected - mine["reference"]))
        self.normalised((loss * mine["keep"]).sum(), mine["keep"].sum(), ctx).backward()

    def normalised(self, loss, count, ctx):
        dist.all_reduce(count)
        return loss * ctx.world_size / count


class Buggy(Clean):
    def normalised(self, loss, count, ctx):
        return loss / count.clamp(min=1)


EXPECT = dict(
    right=[
        r"mean of (the )?(\w+ )?means|own count|local count|count of (its|each|the) (own )?rank"
        r"|its own (rows|count)|rank'?s? (own )?count|average of (the )?(local|rank)"
    ],
    place=[r"ranks? \d|each rank|every rank", r"count|normali[sz]", r"\bdp\b"],
    wrong=[
        r"never reduced|not reduced|missing reduction",
        r"micro.?batch",
        r"\bforward (is )?wrong",
    ],
)
WHY = (
    "Each rank divides by its own kept pairs (2, 3 and 2 of 4, 3 and 3 rows) and DDP averages: a "
    "mean of local means instead of the sum over the global count."
)
