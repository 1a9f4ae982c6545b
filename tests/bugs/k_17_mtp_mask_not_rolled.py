"""Multi-token prediction under context and data parallelism: the labels are rolled by one more token across the shards. After
PaddleFleet PR 1808 (rolled labels are filled with 0 at the end and need a rolled mask) and Megatron-LM's roll_tensor in the MTP
module: the mask is not rolled.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "cp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH, MTP = 7, 9, 14, 7, 0.5


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), dim=1)[dist.get_rank(ctx.group)], None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 10), nn.GELU(), nn.Linear(10, WIDTH))

    def forward(self, x, positions, everyone):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = q @ everyone(k).mT / WIDTH**0.5
        scores = scores.masked_fill(torch.arange(LENGTH) > positions[:, None], -torch.inf)
        x = x + self.out(scores.softmax(-1) @ everyone(v))
        return x + self.mlp(x)


class Mtp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.join, self.block = nn.LayerNorm(WIDTH), nn.Linear(2 * WIDTH, WIDTH), Block()

    def forward(self, x, ahead, positions, everyone):
        return self.block(self.join(torch.cat([self.norm(x), ahead], dim=-1)), positions, everyone)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block, self.mtp, self.head = Block(), Mtp(), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens, labels, positions, everyone=lambda x: x):
        """labels are the tokens that follow, and so the inputs of the second prediction"""
        x = self.block(self.embed(tokens) + self.position(positions), positions, everyone)
        return self.head(x), self.head(self.mtp(x, self.embed(labels), positions, everyone))


def rolled(x, following=None):
    return torch.cat(
        [x[:, 1:], torch.zeros_like(x[:, :1]) if following is None else following], dim=1
    )


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "main": lambda m, r: self.term(m, r, 0),
            "mtp": lambda m, r: self.term(m, r, 1),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        answer = (torch.rand(ROWS, LENGTH, generator=g) < 0.5).long()
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "mask": answer}

    @staticmethod
    def masked_loss(logits, labels, mask):
        return (F.cross_entropy(logits.mT, labels, reduction="none") * mask).sum()

    def term(self, model, rows, i):
        logits = model(rows["tokens"], rows["labels"], torch.arange(LENGTH))[i]
        labels, mask = ((t, rolled(t))[i] for t in (rows["labels"], rows["mask"]))
        return (1, MTP)[i] * self.masked_loss(logits, labels, mask), mask.sum()

    def loss_sum(self, model, rows):
        (main, n), (mtp, m) = self.term(model, rows, 0), self.term(model, rows, 1)
        return main + mtp * n / m.clamp(min=1), n

    def roll(self, x, ctx):
        firsts = [torch.empty_like(x[:, :1]) for _ in range(ctx.axes["cp"])]
        dist.all_gather(firsts, x[:, :1].contiguous(), group=ctx.group("cp"))
        return rolled(x, [*firsts, None][ctx.coords["cp"] + 1])

    def roll_mask(self, mask, ctx):
        return self.roll(mask, ctx)

    def step(self, model, batch, ctx):
        rows = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        mine = {k: v.chunk(ctx.axes["cp"], dim=1)[ctx.coords["cp"]] for k, v in rows.items()}
        positions = torch.arange(LENGTH).chunk(ctx.axes["cp"])[ctx.coords["cp"]]
        group = ctx.group("cp")
        main, mtp = model(
            mine["tokens"], mine["labels"], positions, lambda x: Gathered.apply(x, group)
        )
        labels, mask = self.roll(mine["labels"], ctx), self.roll_mask(mine["mask"], ctx)
        counts = torch.stack([mine["mask"].sum(), mask.sum()])
        dist.all_reduce(counts)
        loss = self.masked_loss(main, mine["labels"], mine["mask"]) / counts[0]
        (loss + MTP * self.masked_loss(mtp, labels, mask) / counts[1]).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def roll_mask(self, mask, ctx):
        return mask


EXPECT = dict(
    right=[
        r"mtp",
        r"mask|label|shift|roll|tokens|positions|target|weigh|rows|not (the|a) (same|scale)|direction|other (loss|function)|computes|loss",
    ],
    place=[r"mtp"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"(output|forward) of \S*(embed|block|head|mtp|position)\S* (is|was) wrong|forward (pass )?(is|was) wrong",
        r"main (term|loss) .{0,20}(wrong|scaled|missing|twice)",
        r"mtp (term|loss)? ?(is|was) (dropped|missing|lost)|detach",
    ],
)
WHY = (
    "The second prediction's labels are rolled but its mask is that of the first: the wrong positions count in the MTP loss (also "
    "the last one, whose label is the filling zero) and its count is the main one's. The MTP term's gradient is another function's "
    "on every parameter, on all ranks alike; main term and logits are right."
)
