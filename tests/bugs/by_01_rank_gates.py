"""A mixture of experts layer on three ranks, two of six experts each, top 2. Dispatch as in DeepEP: a token travels once to each rank that has any of its experts (not once per expert), the rank mixes what
its experts answer with weights made to one within the rank, and the home rank adds up the answers, each by the rank's share of the token's gate. Rows are dealt out to the ranks, two micro-batches; an
expert lies on one rank only, everything else is replicated and summed.

The bug: the rank's share is built with scatter where it has to be scatter_add: a token with both experts on the same rank writes its share twice into one cell, and one of the two gates stays. After the
torch documentation's warning about scatter with indices that are not unique, and reports on deduplicated dispatch (several experts of a token on one rank) in expert parallel libraries.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"ep": 3}}}}
ROWS, TOKENS, INPUTS, WIDTH, HIDDEN, CLASSES = 8, 3, 5, 6, 7, 4
RANKS, PER_RANK, TOP = 3, 2, 2
EXPERTS = RANKS * PER_RANK


def expert():
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, WIDTH))


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(INPUTS, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleDict({str(e): expert() for e in range(EXPERTS)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def gate(self, h):
        weights, chosen = (3 * self.router(h)).softmax(-1).topk(TOP, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def mixture(self, h):
        weights, chosen = self.gate(h)
        gates = torch.zeros(len(h), EXPERTS, dtype=h.dtype).scatter(1, chosen, weights)
        return sum(gates[:, e, None] * self.experts[str(e)](h) for e in range(EXPERTS))

    def forward(self, x, mixture=None):
        h = torch.tanh(self.embed(x)).flatten(0, 1)
        h = h + (mixture or self.mixture)(h)
        return self.head(self.norm(h))


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, sent, received, group):
        fctx.splits, fctx.group = (sent, received), group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(fctx, grad):
        sent, received = fctx.splits
        out = grad.new_empty(sum(sent), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), sent, received, group=fctx.group)
        return out, None, None, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Sparse()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, TOKENS, INPUTS, generator=g),
            "y": torch.randint(CLASSES, (ROWS, TOKENS), generator=g),
        }

    def loss_sum(self, model, rows):
        loss = F.cross_entropy(model(rows["x"]), rows["y"].flatten(), reduction="sum")
        return loss, rows["y"].numel()

    def distribute(self, model, ctx):
        mine = range(ctx.rank * PER_RANK, (ctx.rank + 1) * PER_RANK)
        model.experts = nn.ModuleDict({str(e): model.experts[str(e)] for e in mine})
        return model

    def rank_shares(self, weights, destination):
        shares = torch.zeros(len(weights), RANKS, dtype=weights.dtype)
        return shares.scatter_add(1, destination, weights)

    def mixture(self, model, h, ctx):
        group = ctx.group("ep")
        weights, chosen = model.gate(h)
        gates = torch.zeros(len(h), EXPERTS, dtype=h.dtype).scatter(1, chosen, weights)
        destination = chosen // PER_RANK
        shares = self.rank_shares(weights, destination)
        visits = torch.zeros(len(h), RANKS, dtype=torch.bool).scatter(1, destination, True)
        to, token = visits.t().nonzero(as_tuple=True)
        sent = visits.sum(0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        sent, received = sent.tolist(), received.tolist()
        inner = gates.view(-1, RANKS, PER_RANK)[token, to]
        parcel = AllToAll.apply(torch.cat([h[token], inner], -1), sent, received, group)
        there, inner = parcel.split([WIDTH, PER_RANK], -1)
        inner = inner / inner.sum(-1, keepdim=True)
        answer = sum(inner[:, i, None] * f(there) for i, f in enumerate(model.experts.values()))
        answer = AllToAll.apply(answer, received, sent, group)
        return torch.zeros_like(h).index_add(0, token, answer * shares[token, to, None])

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            logits = model(part["x"], lambda h: self.mixture(model, h, ctx))
            loss = F.cross_entropy(logits, part["y"].flatten(), reduction="sum")
            (loss / (ROWS * TOKENS)).backward()
        for name, p in model.named_parameters():
            if not name.startswith("experts."):
                dist.all_reduce(p.grad, group=ctx.group("ep"))


class Buggy(Clean):
    def rank_shares(self, weights, destination):
        shares = torch.zeros(len(weights), RANKS, dtype=weights.dtype)
        return shares.scatter(1, destination, weights)


EXPECT = dict(
    right=[
        r"scatter|overwrit|one of the two|last (gate|weight)|replaced|not (added|summed|accumulated)|lost|duplicate|shares?",
        r"gate|weight|share|probabilit",
        r"same rank|both experts|two experts|duplicate|repeated|one cell|not unique|scatter_add|sum(med)? (of|over) .{0,30}(gates|weights)",
    ],
    place=[r"rank_shares", r"\bscatter\b", r"shares"],
    wrong=[
        r"all.?to.?all.{0,40}(wrong|swapped|order)|split sizes.{0,30}wrong",
        r"(missing|forgotten|not) .{0,20}(all.?reduce|reduced)|reduced twice",
        r"router.{0,40}(detached|no gradient)",
        r"divisor|mean of means|count of the own",
    ],
)
WHY = (
    "rank_shares has to add the gates of all experts of a token that lie on one rank. scatter writes instead: for tokens whose two experts share a rank the share is one of the two gates (they sum to one, so the "
    "answer of that rank arrives too small), and the way back hands the cell's gradient to both gates. Tokens with experts on two ranks are right. It happens on all ranks wherever such a token is, in both "
    "micro-batches, and makes the experts', router's, embedding's and head's gradients wrong. Fix: scatter_add."
)
