"""A BASE layer (balanced assignment of tokens to experts, one expert per rank, three ranks) by hand: six tokens per rank and micro-batch go to their experts with an all-to-all of uneven portions, the expert of the rank works on the six
tokens it gets, and the results go back and are added, times a sigmoid gate. All-to-all is an autograd Function that gets the portions for sending and receiving. Two micro-batches.

The bug: the backward of the all-to-all sends with the portions of the forward instead of swapping input and output splits. As every expert gets as many tokens as every rank has, all sizes fit and nothing raises. As discussed for the
backward of uneven all-to-all in horovod PR #2631 (gradient with the received splits) and pytorch PR #68786 (input_split_sizes of the gradient are the output_split_sizes), fairscale PR #137.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"ep": 3}}}}
RANKS, TOKENS, FEATURES, WIDTH, HIDDEN, CLASSES = 3, 6, 5, 6, 7, 4
# tokens that rank r sends to expert e, by micro-batch
COUNTS = [[[2, 3, 1], [1, 2, 3], [3, 1, 2]], [[2, 2, 2], [2, 2, 2], [2, 2, 2]]]


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive, group, swap):
        ctx.send, ctx.receive, ctx.group, ctx.swap = send, receive, group, swap
        out = x.new_empty(sum(receive), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        send, receive = (ctx.receive, ctx.send) if ctx.swap else (ctx.send, ctx.receive)
        out = grad.new_empty(sum(receive), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), receive, send, group=ctx.group)
        return out, None, None, None, None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(RANKS))
        self.centroids = nn.Parameter(torch.randn(RANKS, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.group, self.swap = None, True

    def forward(self, x, expert, counts=None):
        x = torch.tanh(self.enter(x))
        gate = torch.sigmoid((x * self.centroids[expert]).sum(-1, keepdim=True))
        if counts is None:
            out = torch.zeros_like(x)
            for e, module in enumerate(self.experts):
                out = torch.where((expert == e)[:, None], module(x), out)
        else:
            rank = dist.get_rank(self.group)
            send, receive = counts[rank], [row[rank] for row in counts]
            order = expert.argsort(stable=True)
            there = AllToAll.apply(x[order], send, receive, self.group, self.swap)
            done = self.experts[rank](there)
            back = AllToAll.apply(done, receive, send, self.group, self.swap)
            out = back[order.argsort()]
        return self.head(x + gate * out)


class Clean:
    swap = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        parts = []
        for counts in COUNTS:
            for row in counts:
                own = torch.repeat_interleave(torch.arange(RANKS), torch.tensor(row))
                parts.append(own[torch.randperm(TOKENS, generator=g)])
        rows = len(parts) * TOKENS
        return {
            "x": torch.randn(rows, FEATURES, generator=g),
            "expert": torch.cat(parts),
            "label": torch.randint(CLASSES, (rows,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["x"], rows["expert"])
        return F.cross_entropy(logits, rows["label"], reduction="sum"), len(rows["x"])

    def distribute(self, model, ctx):
        model.group, model.swap = ctx.group("ep"), self.swap
        return model

    def step(self, model, batch, ctx):
        for turn, counts in enumerate(COUNTS):
            low = (turn * RANKS + ctx.rank) * TOKENS
            rows = {k: v[low : low + TOKENS] for k, v in batch.items()}
            logits = model(rows["x"], rows["expert"], counts)
            loss = F.cross_entropy(logits, rows["label"], reduction="sum")
            (loss / len(batch["x"])).backward()
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=ctx.group("ep"))


class Buggy(Clean):
    swap = False


EXPECT = dict(
    right=[
        r"(?i)all.?to.?all|exchange|dispatch|combine|experts?|transport",
        r"(?i)backward|gradient (of|that|comes|goes|hand)|hands? (back|on)|adjoint|transpose",
        r"(?i)split|portion|swap|rows?|tokens?|adjoint|transpose|wrong (rank|place|token)|"
        r"other (rank|token)",
    ],
    place=[r"(?i)all.?to.?all|experts?|dispatch|combine"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(head|centroids)(\.(weight|bias))? .{0,12}(is|are) wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|reduced (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)only (in )?(the )?(last|second) micro.?batch|micro.?batch 1 .{0,20}(goes|is) wrong",
    ],
)
WHY = (
    "The forward is right. In micro-batch 0 rank r sends 2, 3 and 1 tokens to its own, the next and the one before it, and gets 2, 1 and 3 from them. The backward of both all-to-alls (dispatch and combine) must send with the "
    "portions it received; it uses those of the forward, so portions of three rows go to the rank that gave one and the other way round. Sums are 6 everywhere, no error. The gradient of the experts' outputs reaches rows of other "
    "tokens, on all three ranks: experts.*.up and down are wrong, and, through the dispatch a second time, the gradient of enter. head and centroids (the gate's factor and x are right) are right, the residual part of enter too. "
    "Micro-batch 1 (2, 2, 2) is right. Orders, sums over the ranks and the divisor 36 are right. Fix: swap the splits in the backward."
)
