"""A graph network that predicts one property of small molecules is trained under FSDP2 on three ranks (3, 3 and 2 of eight molecules; two micro-batches a rank, gradients synchronised after the second) and
clips its gradients to a global norm at the end of the step. FSDP averages, so the loss is multiplied by the number of ranks and divided by the eight molecules. The clipping is the project's own: each
rank takes the norm of the shards it holds, the ranks put theirs together, and all scale by the same factor.

The bug: the ranks put their norms together by adding them, and not the squares, so the norm is that of no vector: it is too large (up to the root of three times), and all gradients are scaled down too
far. After the class of reports about hand-written clipping on shards (FSDP1's own clip_grad_norm_ was written for it, DeepSpeed and fairseq issues about the norm of partitioned gradients).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
KINDS, WIDTH, ATOMS, ROWS, MAX_NORM = 5, 7, 6, 8, 0.05


class Message(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.others = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, bonds):
        return x + torch.tanh(self.norm(self.own(x) + bonds @ self.others(x)))


class Molecules(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(KINDS, WIDTH)
        self.messages = nn.ModuleList(Message() for _ in range(3))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, kinds, bonds, there):
        x = self.kinds(kinds)
        for message in self.messages:
            x = message(x, bonds)
        return self.out((x * there[..., None]).sum(1)).squeeze(-1)


class Clean:
    after = "clip"
    max_norm = MAX_NORM

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Molecules()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        size = torch.randint(3, ATOMS + 1, (ROWS,), generator=g)
        there = (torch.arange(ATOMS) < size[:, None]).to(torch.get_default_dtype())
        bonds = (torch.rand(ROWS, ATOMS, ATOMS, generator=g) < 0.4).to(there.dtype)
        bonds = torch.maximum(bonds, bonds.transpose(1, 2)) * there[:, :, None] * there[:, None]
        return {
            "kinds": torch.randint(KINDS, (ROWS, ATOMS), generator=g),
            "bonds": bonds,
            "there": there,
            "value": torch.randn(ROWS, generator=g),
        }

    def loss_sum(self, model, rows):
        guess = model(rows["kinds"], rows["bonds"], rows["there"])
        return (guess - rows["value"]).square().sum(), len(guess)

    def distribute(self, model, ctx):
        for message in model.messages:
            fully_shard(message, mesh=ctx.mesh)
        fully_shard(model, mesh=ctx.mesh)
        return model

    def total_norm(self, shards, ctx):
        total = torch.stack([s.square().sum() for s in shards]).sum()
        dist.all_reduce(total, group=ctx.group("dp"))
        return total.sqrt()

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for n in range(2):
            model.set_requires_gradient_sync(n == 1)
            loss, _ = self.loss_sum(model, {k: v.tensor_split(2)[n] for k, v in mine.items()})
            (loss * ctx.world_size / ROWS).backward()
        shards = [p.grad.to_local() for p in model.parameters()]
        factor = (MAX_NORM / (self.total_norm(shards, ctx) + 1e-6)).clamp(max=1.0)
        for shard in shards:
            shard.mul_(factor)


class Buggy(Clean):
    def total_norm(self, shards, ctx):
        total = torch.stack([s.norm() for s in shards]).norm()
        dist.all_reduce(total, group=ctx.group("dp"))
        return total


EXPECT = dict(
    right=[r"norm", r"clip|scaled? (down|too)|max_norm|total_norm|factor"],
    place=[r"total_norm", r"clip", r"norm .{0,60}(shard|rank|group|global)", r"factor"],
    wrong=[
        r"gradients? .{0,20}not (been )?(all.?)?reduced|(reduced|summed|counted) twice|replicated parameter",
        r"mean of means|divi(ded|des) by (its|their) own (count|number|rows)|norm .{0,30}not (been )?(all.?)?reduced|clips? by (its|their) own",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"backward formula|(messages|kinds|out) .{0,20}(computes|is) wrong in the forward|(wrong|other) rows",
    ],
)
WHY = (
    "total_norm takes the 2-norm of the shards of this rank and all-reduces the norms with SUM; the norm of the whole is the root of the sum of their squares. The sum of three norms is larger than that, so "
    "the step clips by a norm that is too large and all gradients on all three ranks are too small by the same factor (right norm / sum of norms). Before the clipping the gradients are right, in both "
    "micro-batches, and so are loss and FSDP's reduction. Fix: all-reduce the squares and take the root after."
)
