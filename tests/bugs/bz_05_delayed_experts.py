"""A mixture of experts on three expert-parallel ranks (two of six experts each, top-1 routing, dropless): tokens go to their expert's rank by all-to-all, a grouped linear works on the tokens of each local
expert in turn. The weight gradients of the grouped linears are delayed as in Megatron/TransformerEngine (delay_wgrad_compute): the backward computes the input gradient only and keeps input and output gradient,
backward_dw() forms the weight gradient later. Schedule as with overlapped communication: the second micro-batch's forward comes before the first one's backward. The rest is data parallel over the same ranks.

The bug: backward_dw() takes the number of tokens per expert from the module, where the last forward left it, instead of from what was kept with the input. After the reports on delayed weight gradients of
TransformerEngine's GroupedLinear and overlapped 1F1B schedules with one module used by two micro-batches at a time.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"ep": 3}}}}
ROWS, LENGTH, VOCABULARY, WIDTH, INNER, EXPERTS = 13, 6, 19, 6, 8, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.fc1 = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.5)
        self.fc2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.5)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embed(ids).flatten(0, 1)
        gate, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.stack([F.silu(x @ w1.t()) @ w2.t() for w1, w2 in zip(self.fc1, self.fc2)])
        return self.head(x + gate[:, None] * y[chosen, torch.arange(len(x))])


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, outgoing, incoming, group):
        fctx.splits = outgoing, incoming, group
        y = x.new_empty(sum(incoming), x.shape[1])
        dist.all_to_all_single(y, x.contiguous(), incoming, outgoing, group=group)
        return y

    @staticmethod
    def backward(fctx, grad):
        outgoing, incoming, group = fctx.splits
        back = grad.new_empty(sum(outgoing), grad.shape[1])
        dist.all_to_all_single(back, grad.contiguous(), outgoing, incoming, group=group)
        return back, None, None, None


class GroupedProduct(torch.autograd.Function):
    """x[rows of expert e] @ weight[e].T; the gradient of the weight is left to the store."""

    @staticmethod
    def forward(fctx, x, weight, splits, store):
        fctx.save_for_backward(x, weight)
        fctx.splits, fctx.store = splits, store
        return torch.cat([part @ w.t() for part, w in zip(x.split(splits), weight)])

    @staticmethod
    def backward(fctx, grad):
        x, weight = fctx.saved_tensors
        fctx.store.append((x, grad, fctx.splits))
        parts = zip(grad.split(fctx.splits), weight)
        return torch.cat([part @ w for part, w in parts]), None, None, None


class GroupedLinear:
    def __init__(self, weight):
        self.weight, self.store, self.m_splits = weight, [], None

    def __call__(self, x, m_splits):
        self.m_splits = m_splits
        return GroupedProduct.apply(x, self.weight.detach(), m_splits, self.store)

    def accumulate(self, x, grad, splits):
        start = 0
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)
        for e, n in enumerate(splits):
            own = slice(start, start + n)
            self.weight.grad[e] += grad[own].t() @ x[own]
            start += n

    def backward_dw(self):
        x, grad, splits = self.store.pop(0)
        self.accumulate(x, grad, splits)


class DelayedGroupedLinear(GroupedLinear):
    def backward_dw(self):
        x, grad, _ = self.store.pop(0)
        self.accumulate(x, grad, self.m_splits)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss_sum(self, model, rows):
        labels = rows["labels"].flatten()
        return F.cross_entropy(model(rows["ids"]), labels, reduction="sum"), labels.numel()

    def distribute(self, model, ctx):
        for name in ("fc1", "fc2"):
            own = getattr(model, name).detach().chunk(ctx.axes["ep"])[ctx.coords["ep"]]
            setattr(model, name, nn.Parameter(own.clone()))
        return model

    def grouped_linear(self, weight):
        return GroupedLinear(weight)

    def experts(self, x, chosen, fc1, fc2, ctx):
        group, size = ctx.group("ep"), ctx.axes["ep"]
        local = EXPERTS // size
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        outgoing = counts.view(size, local).sum(1).tolist()
        incoming = arriving.view(size, local).sum(1).tolist()
        received = AllToAll.apply(x[order], outgoing, incoming, group)
        expert = torch.arange(local).repeat(size).repeat_interleave(arriving)
        by_expert = expert.argsort(stable=True)
        splits = expert.bincount(minlength=local).tolist()
        y = fc2(F.silu(fc1(received[by_expert], splits)), splits)
        y = AllToAll.apply(y[by_expert.argsort()], incoming, outgoing, group)
        return y[order.argsort()]

    def forward(self, model, rows, fc1, fc2, ctx):
        x = model.embed(rows["ids"]).flatten(0, 1)
        gate, chosen = model.router(x).softmax(-1).max(-1)
        logits = model.head(x + gate[:, None] * self.experts(x, chosen, fc1, fc2, ctx))
        return F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum")

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["ep"])[ctx.coords["ep"]] for k, v in batch.items()}
        for p in model.parameters():
            p.grad = None
        fc1, fc2 = self.grouped_linear(model.fc1), self.grouped_linear(model.fc2)
        losses = [
            self.forward(model, {k: v.tensor_split(2)[n] for k, v in mine.items()}, fc1, fc2, ctx)
            for n in range(2)
        ]
        for loss in losses:
            (loss / batch["labels"].numel()).backward()
            fc2.backward_dw()
            fc1.backward_dw()
        for name, p in model.named_parameters():
            if name not in ("fc1", "fc2"):
                dist.all_reduce(p.grad, group=ctx.group("ep"))


class Buggy(Clean):
    def grouped_linear(self, weight):
        return DelayedGroupedLinear(weight)


EXPECT = dict(
    right=[
        r"split|count|token|row|expert|micro.?batch|boundar|slice",
        r"weight|fc1|fc2|backward_dw|expert",
        r"(other|another|last|latest|later|second|next|wrong|first|overwrit|stale).{0,60}(micro.?batch|split|count|expert|row|token|forward|call)|(micro.?batch|split|count|expert|row|token|attribute|state).{0,60}(other|another|last|latest|later|second|next|wrong|first|overwrit|stale)",
    ],
    place=[
        r"backward_dw",
        r"m_splits|splits",
        r"DelayedGroupedLinear|GroupedLinear|accumulate",
        r"fc1|fc2",
    ],
    wrong=[
        r"(not|never) reduced|missing (all.?)?reduc|reduced (twice|again)",
        r"divisor|denominator|mean of means|scaled by",
        r"all.?to.?all.{0,40}(wrong|adjoint|lost)|tokens (are )?sent to the wrong|router.{0,20}wrong",
        r"forward.{0,30}is wrong|second micro.?batch.{0,30}(lost|dropped)",
    ],
)
WHY = (
    "With two forwards before the first backward, m_splits of the module are those of the second micro-batch when backward_dw of the first runs: input and output gradient of micro-batch 0 are cut at the boundaries "
    "of micro-batch 1, so that tokens of one local expert are added to the other's weight gradient and tokens beyond the sum are left out. Only fc1 and fc2 are wrong, on the ranks whose counts differ between "
    "the micro-batches; the second micro-batch and all input gradients are right. A right cause says that the expert weights' gradient of the first micro-batch uses splits/counts of another micro-batch (or rows of "
    "the wrong expert). Fix: keep the splits with the input."
)
