"""Vocabulary-parallel cross entropy with label smoothing, from logits cut over tp.
After FAULTS C19-01 (Megatron-LM): smoothing uses the local vocabulary's size and mean."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 2}}}}
ROWS, LENGTH, WIDTH, VOCAB, SMOOTHING = 6, 5, 10, 18, 0.2


class CopyIn(torch.autograd.Function):
    """Identity forward, SUM over the group backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOut(torch.autograd.Function):
    """SUM over the group forward, identity backward."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def hidden(self, ids):
        return self.norm(self.blocks(self.embed(ids)))

    def forward(self, ids):
        return self.head(self.hidden(ids))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss_sum(self, model, rows):
        logits, labels = model(rows["ids"]).flatten(0, 1), rows["labels"].flatten()
        loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=SMOOTHING)
        return loss, labels.numel()

    def distribute(self, model, ctx):
        self.kept = VOCAB // ctx.axes["tp"]
        self.start = self.kept * ctx.coords["tp"]
        weight = model.head.weight[self.start : self.start + self.kept]
        model.head.weight = nn.Parameter(weight.detach().clone())
        return model

    def mean_logit(self, own, group):
        return SumOut.apply(own.sum(-1), group) / VOCAB

    def step(self, model, batch, ctx):
        group, labels = ctx.group("tp"), batch["labels"]
        own = model.head(CopyIn.apply(model.hidden(batch["ids"]), group))
        largest = own.detach().amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        total = SumOut.apply((own - largest[..., None]).exp().sum(-1), group)
        here = (labels >= self.start) & (labels < self.start + self.kept)
        index = (labels - self.start).clamp(0, self.kept - 1)
        chosen = own.gather(-1, index[..., None])[..., 0].masked_fill(~here, 0.0)
        chosen = SumOut.apply(chosen, group)
        wanted = (1 - SMOOTHING) * chosen + SMOOTHING * self.mean_logit(own, group)
        ((total.log() + largest - wanted).sum() / labels.numel()).backward()


class Buggy(Clean):
    def mean_logit(self, own, group):
        return own.mean(-1)


EXPECT = dict(
    right=[
        r"head|loss|logits|cross.?entropy",
        r"loss (itself|differs|value|function|is (wrong|another|computed)|term)"
        r"|(outside|after|behind|above) (the |every )?(last )?(model|module|head)|enters"
        r"|arrives"
        r"|(into|at|of) (the )?(output|logits|head)|other weights? (of|for)|weighs|weighted"
        r"|smoothing",
    ],
    place=[r"head", r"loss|cross.?entropy"],
    wrong=[r"embed.*forward", r"averag", r"micro.?batch"],
)
WHY = (
    "The smoothing term takes the mean over the rank's own half of the logits: its gradient is "
    "twice as large on each shard of head and on the hidden state; everything else is right."
)
