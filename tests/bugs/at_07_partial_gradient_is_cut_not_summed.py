"""Two pipeline stages with two tensor-parallel ranks each (pp 2, tp 2), scatter/gather hand-over: the boundary tensor is the same on both tensor ranks, so each sends only its half of the channels,
and the receiving stage gathers the halves.
On the way back the second stage sums the partial input gradients of its column-parallel layer and cuts them in one go (a reduce-scatter, in place of an all-reduce and a cut). Three micro-batches (3, 2 and 2 rows).

The bug: on the way back the gradient is only cut, as on the way out, and not summed over the tensor ranks: the halves that the first stage puts together are partial. As in
deepspeedai/Megatron-DeepSpeed issue 227 (PartitionedTensor over something that differs
between the tensor ranks), vllm PR 24021, awslabs/slapo PR 20 (reduce-scatter or cut on the way back).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2, "tp": 2}}}}
ROWS, TOKENS, WORDS, WIDTH, HIDDEN, CLASSES = 7, 3, 7, 6, 8, 5
MICRO = [(0, 3), (3, 5), (5, 7)]


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Mlp(nn.Module):
    """Column- and row-parallel; each rank reads its part of the full weights."""

    def __init__(self):
        super().__init__()
        self.up, self.up_bias = (
            nn.Parameter(torch.randn(HIDDEN, WIDTH) * 0.5),
            nn.Parameter(torch.randn(HIDDEN) * 0.3),
        )
        self.down, self.down_bias = (
            nn.Parameter(torch.randn(WIDTH, HIDDEN) * 0.5),
            nn.Parameter(torch.randn(WIDTH) * 0.3),
        )
        self.group = None

    def forward(self, x):
        if self.group is None:
            h = F.gelu(F.linear(x, self.up, self.up_bias))
            return F.linear(h, self.down) + self.down_bias
        size = HIDDEN // dist.get_world_size(self.group)
        mine = slice(dist.get_rank(self.group) * size, (dist.get_rank(self.group) + 1) * size)
        h = F.gelu(F.linear(x, self.up[mine], self.up_bias[mine]))
        return SumForward.apply(F.linear(h, self.down[:, mine]), self.group) + self.down_bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.first, self.norm, self.second = Mlp(), nn.LayerNorm(WIDTH), Mlp()
        self.head = nn.Linear(WIDTH, CLASSES)

    def stage(self, number, x):
        if number == 0:
            x = self.embed(x)
            inner = x if self.first.group is None else SumBackward.apply(x, self.first.group)
            return self.norm(x + self.first(inner))
        return self.head(torch.tanh(self.second(x)))

    def forward(self, ids):
        return self.stage(1, self.stage(0, ids))


class Clean:
    summed = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(WORDS, (ROWS, TOKENS), generator=g),
            "label": torch.randint(CLASSES, (ROWS, TOKENS), generator=g),
        }

    def loss_sum(self, model, rows):
        scores, label = model(rows["ids"]).flatten(0, 1), rows["label"].flatten()
        return F.cross_entropy(scores, label, reduction="sum"), len(label)

    def distribute(self, model, ctx):
        model.first.group = model.second.group = ctx.group("tp")
        return model

    def step(self, model, batch, ctx):
        pp, tp = ctx.group("pp"), ctx.group("tp")
        stage, lane, lanes = dist.get_rank(pp), dist.get_rank(tp), dist.get_world_size(tp)
        peer = dist.get_global_rank(pp, 1 - stage)
        kept = []
        for low, high in MICRO:
            if stage == 0:
                x = model.stage(0, batch["ids"][low:high])
                dist.send(x.detach().chunk(lanes, 2)[lane].contiguous(), peer, group=pp)
                kept.append((None, x))
            else:
                x = self.gathered(self.receive(model, high - low, peer, pp), tp).requires_grad_()
                scores = model.stage(1, x).flatten(0, 1)
                label = batch["label"][low:high].flatten()
                loss = F.cross_entropy(scores, label, reduction="sum") / (ROWS * TOKENS)
                kept.append((x, loss))
        for (low, high), (x, out) in zip(MICRO, kept):
            if stage == 1:
                out.backward()
                grad = x.grad.clone()
                if self.summed:
                    dist.all_reduce(grad, group=tp)
                dist.send(grad.chunk(lanes, 2)[lane].contiguous(), peer, group=pp)
            else:
                out.backward(self.gathered(self.receive(model, high - low, peer, pp), tp))
        for name, p in model.named_parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=pp)
            if name.split(".")[-1] in ("up", "up_bias", "down"):
                dist.all_reduce(p.grad, group=tp)

    def receive(self, model, rows, peer, group):
        part = model.head.weight.new_empty(rows, TOKENS, WIDTH // 2)
        dist.recv(part, peer, group=group)
        return part

    def gathered(self, part, group):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, 2)


class Buggy(Clean):
    summed = False


EXPECT = dict(
    right=[
        r"(?i)stage|boundary|hand.?(ed|s)?.?(over|back)|pipeline|sent|transport|first"
        r"|norm|embed|second",
        r"(?i)gradient|backward|way back|adjoint",
        r"(?i)partial|not (been )?(summed|reduced|all.?reduced)|never (summed|reduced)"
        r"|missing|(own|one) (tensor )?(rank|part|half)"
        r"|incomplete|wrong gradient|differ|lost|other (direction|gradient)|adjoint"
        r"|hands? back|wrong",
    ],
    place=[r"(?i)stage|boundary|hand.?(ed|s)?.?(over|back)|second|norm|embed|transport|first"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(head|second)\.\S+ (is|are) wrong|parameter gradients? .{0,20}(never"
        r"|not) (been )?(all.?)?reduced",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten|swapped|exchanged)",
        r"(?i)only (on )?rank [0-3]\b|rank [0-3] alone",
        r"(?i)reduced twice|summed twice|counted (twice|again)",
    ],
)
WHY = (
    "The forward is right on all four ranks; so are the gradients of second and head. The gradient by the boundary tensor on each tensor rank of stage 1 (ranks 2 and 3) is partial, since it comes "
    "through that rank's half of second.up only; it must be summed over tp before each "
    "rank sends its half of the channels. The buggy step sends channels 0-2 of rank 2's partial gradient and channels 3-5 of rank 3's. Stage 0 (ranks 0 and 1) gathers these halves and gets the same "
    "wrong gradient on both ranks: norm, first and embed are wrong in direction, for all "
    "rows and all three micro-batches. The split of the activation on the way out (which is the same on both tensor ranks) is right, so are the divisor 21, the order of the micro-batches and the "
    "parameter sums over pp and tp. Fix: reduce-scatter "
    "(or all-reduce, then cut) the gradient over tp before it is sent."
)
