"""A linear-attention language model with two heads (next token and the one after), DDP over three
ranks (4, 4 and 3 of 11 rows; micro-batches of two, no_sync before the last), with a communication
hook that compresses: a bucket is given random signs, turned by a Hadamard transform (as DRIVE, EDEN
and QuaRot-like hooks do ahead of quantisation; the quantiser itself is off here), summed over the
ranks and turned back.

Bug: the generator of the signs is seeded with seed + rank, as the training script seeds all others.
The ranks then add vectors turned in unlike ways, and each undoes its own turn. After reports on
randomised gradient compression, where the shared random source is the usual trap.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
WORDS, D, T, ROWS, SEED = 10, 6, 7, 11, 20


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.norm = nn.LayerNorm(D)
        self.heads = nn.ModuleList([nn.Linear(D, WORDS), nn.Linear(D, WORDS)])

    def forward(self, ids):
        x = self.words(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("btd,bte->btde", k, v).cumsum(1)
        y = torch.einsum("btd,btde->bte", q, state) / (q * k.cumsum(1)).sum(-1, keepdim=True)
        x = self.norm(x + self.out(y))
        return [head(x) for head in self.heads]


def hadamard(x):
    """Orthonormal Walsh-Hadamard transform of a vector whose length is a power of two."""
    n, width = x.numel(), 1
    while width < n:
        pair = x.view(-1, 2, width)
        x = torch.stack([pair[:, 0] + pair[:, 1], pair[:, 0] - pair[:, 1]], 1).flatten()
        width *= 2
    return x / n**0.5


class Rotation:
    def __init__(self, group):
        self.group = group
        self.generator = torch.Generator().manual_seed(self.seed())

    def seed(self):
        return SEED

    def signs(self, n, like):
        return torch.randint(2, (n,), generator=self.generator).to(like) * 2 - 1


def rotated_sum(state, bucket):
    flat = bucket.buffer()
    n = 1 << (flat.numel() - 1).bit_length()
    signs = state.signs(n, flat)
    turned = hadamard(signs * F.pad(flat, (0, n - flat.numel())))
    future = dist.all_reduce(turned, group=state.group, async_op=True).get_future()

    def turn_back(done):
        return (signs * hadamard(done.value()[0]))[: flat.numel()]

    return future.then(turn_back)


class Clean:
    rotation = Rotation

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 41)
        return TwoHeads()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 410)
        return {"ids": torch.randint(WORDS, (ROWS, T + 2), generator=g)}

    def loss_sum(self, model, rows):
        ids, loss = rows["ids"], 0.0
        for ahead, logits in enumerate(model(ids[:, :T]), 1):
            wanted = ids[:, ahead : ahead + T]
            loss = loss + F.cross_entropy(logits.transpose(1, 2), wanted, reduction="sum") / ahead
        return loss, ids.shape[0] * T

    def distribute(self, model, ctx):
        group = ctx.group("dp")
        model = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.0005)
        model.register_comm_hook(self.rotation(group), rotated_sum)
        return model

    def step(self, model, batch, ctx):
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        parts = own.split(2)
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss, _ = self.loss_sum(model, {"ids": batch["ids"][part]})
                (loss / (ROWS * T)).backward()


class SeededRotation(Rotation):
    def seed(self):
        return SEED + dist.get_rank(self.group)


class Buggy(Clean):
    rotation = SeededRotation


EXPECT = dict(
    right=[
        r"sign|rotat|seed|generator|random|turned|draw",
        r"rank",
        r"differ|unlike|own|per.?rank|\+ ?(dist\.)?(get_)?rank|not the same|disagree|each rank|"
        r"depends on|shared|seed",
    ],
    place=[r"SeededRotation", r"\bseed\b", r"\bsigns\b", r"rotated_sum", r"generator", r"Rotation"],
    wrong=[
        r"hadamard.{0,40}(normali[sz]|scale|factor|sqrt).{0,20}(wrong|miss)",
        r"padd\w+.{0,40}(wrong|lost|miss)",
        r"no_sync.{0,40}(wrong|miss|early|late)",
        r"(divided|averaged).{0,30}(world|three|3)",
        r"(same|wrong|other) rows",
        r"(not|never|missing).{0,15}(all.?)?reduc",
    ],
)
WHY = """The hook adds up H S_r g_r over the ranks and undoes the turn with H and S: it is a sum
only if every rank has the same signs S. SeededRotation.seed gives SEED + rank, so the ranks draw
unlike signs; each gets its own gradient right and those of the others with scrambled signs, and
the ranks do not agree on the result. A right cause says that the random signs (the seed of the
generator in the hook) differ from rank to rank. The fix is one seed for all ranks."""
