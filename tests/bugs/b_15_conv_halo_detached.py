"""A causal convolution on a sequence cut over ranks: each gets the last columns of the one before.
After Mamba context parallel reports: the halo comes by plain send/recv."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 4}}}}
ROWS, LENGTH, WIDTH, KERNEL, VOCAB = 5, 12, 8, 3, 11


def pass_on(x, group, by):
    """Rank r gets x of rank r - by; at the end of the line zeros come."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    out, works, x = torch.zeros(x.shape, dtype=x.dtype), [], x.contiguous()
    if 0 <= rank + by < size:
        works.append(dist.isend(x, dist.get_global_rank(group, rank + by), group=group))
    if 0 <= rank - by < size:
        works.append(dist.irecv(out, dist.get_global_rank(group, rank - by), group=group))
    for work in works:
        work.wait()
    return out


class Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return pass_on(x, group, 1)

    @staticmethod
    def backward(ctx, grad):
        return pass_on(grad, ctx.group, -1), None


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj, self.conv1d = nn.Linear(WIDTH, WIDTH), nn.Conv1d(WIDTH, WIDTH, KERNEL)
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, halo):
        y = self.in_proj(x)
        y = torch.cat([halo(y[:, 1 - KERNEL :]), y], dim=1)
        return self.out_proj(F.silu(self.conv1d(y.transpose(1, 2))).transpose(1, 2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mixer = nn.RMSNorm(WIDTH), Mixer()

    def forward(self, x, halo):
        return x + self.mixer(self.norm(x), halo)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm_f, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, halo=torch.zeros_like):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, halo)
        return self.lm_head(self.norm_f(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=g)
        valid = torch.arange(LENGTH) < lengths
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(~valid, -100)}

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.token_loss(model(rows["ids"]), rows["labels"]), (rows["labels"] != -100).sum()

    def halo(self, x, group):
        return Halo.apply(x, group)

    def step(self, model, batch, ctx):
        group = ctx.group("cp")
        mine = {k: v.chunk(ctx.axes["cp"], dim=1)[ctx.coords["cp"]] for k, v in batch.items()}
        logits = model(mine["ids"], lambda x: self.halo(x, group))
        (self.token_loss(logits, mine["labels"]) / (batch["labels"] != -100).sum()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def halo(self, x, group):
        return pass_on(x.detach(), group, 1)


EXPECT = dict(
    right=[
        r"mixer|in_proj|conv1d|send|recv|halo",
        r"backward|detach|no gradient|without (a )?gradient|lost|missing|not sent back|adjoint",
    ],
    place=[r"layers\.1(\.mixer)?", r"in_proj|conv1d", r"send|recv", r"ranks? [012]"],
    wrong=[r"averag", r"counted twice", r"\bforward (is )?wrong"],
)
WHY = (
    "The halo of the causal convolution is received without a graph: its gradient never returns to "
    "the rank before, so in_proj (and all below it) misses the border columns of each shard."
)
