"""A decoder with a vocabulary-parallel cross entropy and PaLM's z-loss in one function. After flash-attention's cross entropy with
`process_group` and `lse_square_scale` (each shard's log-sum-exp comes first and the one of all shards after it): the backward of the
z-loss uses the first one.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 3}}}}
ROWS, LENGTH, WIDTH, HIDDEN, VOCABULARY, Z = 9, 8, 8, 9, 22, 0.05


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, first, group, kept):
        local = logits.logsumexp(-1)
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, local, group=group)
        lse = torch.stack(parts).logsumexp(0)
        inside = (labels >= first) & (labels < first + logits.shape[-1])
        column = (labels - first).masked_fill(~inside, 0)
        hit = logits.gather(-1, column[:, None])[:, 0] * inside
        dist.all_reduce(hit, group=group)
        valid = labels != -100
        ctx.save_for_backward(
            (logits - lse[:, None]).exp(), kept(lse, local), column, inside, valid
        )
        return (lse - hit + Z * lse.square()) * valid

    @staticmethod
    def backward(ctx, grad):
        p, lse, column, inside, valid = ctx.saved_tensors
        d = p * (1 + 2 * Z * lse)[:, None]
        d[torch.arange(len(d)), column] -= inside.to(d.dtype)
        return d * (grad * valid)[:, None], None, None, None, None


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (
            nn.Linear(WIDTH, HIDDEN, bias=False),
            nn.Linear(WIDTH, HIDDEN, bias=False),
        )
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x, enter, leave):
        h = enter(self.norm(x))
        return x + leave(self.down(F.silu(self.gate(h)) * self.up(h)))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, enter=lambda x: x, leave=lambda x: x):
        x = self.mix(self.embed(ids))[0]
        for block in self.blocks:
            x = block(x, enter, leave)
        return self.head(enter(self.norm(x)))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "cross_entropy": lambda m, r: (self.sums(m, r)[0], (r["labels"] != -100).sum()),
            "z": lambda m, r: (Z * self.sums(m, r)[1], (r["labels"] != -100).sum()),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    @staticmethod
    def sums(model, rows):
        logits, labels = model(rows["ids"]).flatten(0, 1), rows["labels"].flatten()
        return (
            F.cross_entropy(logits, labels, reduction="sum"),
            (logits.logsumexp(-1).square() * (labels != -100)).sum(),
        )

    def loss_sum(self, model, rows):
        cross_entropy, z = self.sums(model, rows)
        return cross_entropy + Z * z, (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        def cut(linear, dim):
            shard = linear.weight.detach().tensor_split(ctx.axes["tp"], dim)[ctx.coords["tp"]]
            linear.weight = nn.Parameter(shard.clone())

        for block in model.blocks:
            cut(block.gate, 0)
            cut(block.up, 0)
            cut(block.down, 1)
        cut(model.head, 0)
        self.first = int(torch.arange(VOCABULARY).tensor_split(ctx.axes["tp"])[ctx.coords["tp"]][0])
        return model

    @staticmethod
    def kept(lse, local):
        return lse

    def step(self, model, batch, ctx):
        tp = ctx.group("tp")
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        logits = model(mine["ids"], lambda x: Copied.apply(x, tp), lambda x: Summed.apply(x, tp))
        losses = TokenLoss.apply(
            logits.flatten(0, 1), mine["labels"].flatten(), self.first, tp, self.kept
        )
        (losses.sum() / (batch["labels"] != -100).sum()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    @staticmethod
    def kept(lse, local):
        return local


EXPECT = dict(
    right=[
        r"\bz\b|z.?loss|z term|log.?sum.?exp|normali[sz]er",
        r"backward|gradient|coefficient|weight|scale|shard|local|factor|wrong",
    ],
    place=[r"head", r"\bz\b|z.?loss", r"(all|every|each) (parameters?|ranks?)"],
    wrong=[
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"cross_entropy\S* .{0,30}(wrong|missing|counted|scaled)",
        r"never (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"mean of (the )?(rank |ranks' )?means",
    ],
)
WHY = (
    "The derivative of the z-loss, 2 Z lse softmax, is taken with the log-sum-exp of the rank's own vocabulary shard instead of that "
    "of all shards, so the z term's gradient at the logits is too small and differently so on each tp rank. "
    "All gradients are wrong by their z part (head.weight and everything below); the loss and the cross-entropy part are right."
)
