"""Mixture of six experts over three ranks (two each), top-2 routing, dispatch by all-to-all with uneven splits; what arrives is sorted from
(source, expert) to expert order, and back after the experts. After reports on token permutation: the way back indexes with the same
permutation instead of its inverse.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"ep": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH, EXPERTS, TOP = 8, 6, 20, 9, 6, 2


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, got, group):
        ctx.rest = sent, got, group
        out = x.new_empty(sum(got), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), got, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        sent, got, group = ctx.rest
        return AllToAll.apply(grad, got, sent, group), None, None, None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, dispatch):
        x = self.rnn(self.embed(ids))[0]
        flat = x.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).topk(TOP)
        weight = weight / weight.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        y = dispatch(flat[order // TOP], counts)
        y = torch.zeros_like(y).index_copy(0, order, y).unflatten(0, (-1, TOP))
        y = (y * weight[..., None]).sum(1)
        return self.head(self.norm(x + y.view_as(x)))


def token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        model = LM()
        with torch.no_grad():
            model.router.weight.mul_(4)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss_sum(self, model, rows):
        def here(x, counts):
            parts = zip(model.experts, x.split(counts.tolist()), strict=True)
            return torch.cat([expert(part) for expert, part in parts])

        return token_loss(model(rows["ids"], here), rows["labels"]), rows["labels"].numel()

    def distribute(self, model, ctx):
        n, me = ctx.axes["ep"], ctx.coords["ep"]
        for e in range(EXPERTS):
            if e // (EXPERTS // n) != me:
                model.experts[e] = None
        return model

    def back(self, y, order):
        """From the experts' order to that in which the tokens came."""
        return y[order.argsort()]

    def step(self, model, batch, ctx):
        n, me, group = ctx.axes["ep"], ctx.coords["ep"], ctx.group("ep")
        local = EXPERTS // n

        def dispatch(x, counts):
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts, group=group)
            sent, got = counts.view(n, local).sum(1).tolist(), theirs.view(n, local).sum(1).tolist()
            x = AllToAll.apply(x, sent, got, group)
            kind = torch.arange(local).repeat(n).repeat_interleave(theirs)
            order = kind.argsort(stable=True)
            parts = x[order].split(theirs.view(n, local).sum(0).tolist())
            own = model.experts[me * local : (me + 1) * local]
            y = torch.cat([expert(part) for expert, part in zip(own, parts, strict=True)])
            return AllToAll.apply(self.back(y, order), got, sent, group)

        own = torch.arange(ROWS).tensor_split(n)[me]
        ids, labels = batch["ids"][own], batch["labels"][own]
        loss = token_loss(model(ids, dispatch), labels)
        (loss / batch["labels"].numel()).backward()
        for name, p in model.named_parameters():
            if not name.startswith("experts."):
                dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def back(self, y, order):
        return y[order]


EXPECT = dict(
    right=[
        r"forward|activation|goes into|input|output|what goes in",
        r"norm|experts?|down|all.?to.?all|dispatch|between",
    ],
    place=[r"norm|experts?"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"router\S* .{0,25}(output|forward) .{0,15}wrong",
        r"(own|local) (count|denominator|divisor)",
        r"(tokens?|rows?) .{0,20}(dropped|lost)|capacity",
    ],
)
WHY = (
    "After the experts the outputs are put back with `order` instead of its inverse, so most tokens get the expert outputs of other tokens (also other ranks' tokens and "
    "of another of the two experts) before they are weighed and added. Embedding, rnn, router and the experts themselves compute right; what goes into "
    "`norm` is wrong on every rank, and with it the loss and all gradients. Counts, splits, reductions and the divisor are right."
)
