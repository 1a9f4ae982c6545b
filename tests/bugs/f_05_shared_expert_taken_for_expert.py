"""Mixture of experts with expert parallelism inside data parallelism, one shared expert beside the routed ones.
After FAULTS C05-16 (Pai-Megatron-Patch PR 425, gradients of shared experts) and the usual `"expert" in name`:
the shared expert's parameters are taken for routed ones and reduced over the expert-data group.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"edp": 2, "ep": 2}}}}
ROWS, LENGTH, WIDTH, EXPERTS, VOCAB = 11, 4, 6, 6, 13


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, received, sent, group):
        ctx.args = received, sent, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        received, sent, group = ctx.args
        out = grad.new_empty(sum(sent), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), sent, received, group=group)
        return out, None, None, None


class MLP(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(e): MLP(5) for e in range(EXPERTS)})
        self.shared_expert = MLP(7)
        self.group, self.ranks = None, 1

    def forward(self, x):
        chance, expert = (2 * self.router(x)).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        counts = expert.bincount(minlength=EXPERTS)
        here, sent, received = x[order], None, counts[None]
        if self.group is not None:
            received = torch.empty_like(counts)
            dist.all_to_all_single(received, counts, group=self.group)
            sent = counts.view(self.ranks, -1).sum(1).tolist()
            received = received.view(self.ranks, -1)
            here = AllToAll.apply(here, received.sum(1).tolist(), sent, self.group)
        pieces = list(here.split(received.flatten().tolist()))
        local = received.shape[1]
        for i, mlp in enumerate(self.experts.values()):
            out = mlp(torch.cat(pieces[i::local]))
            pieces[i::local] = out.split(received[:, i].tolist())
        here = torch.cat(pieces)
        if self.group is not None:
            here = AllToAll.apply(here, sent, received.sum(1).tolist(), self.group)
        routed = torch.zeros_like(x).index_copy(0, order, here)
        return routed * chance[:, None] + self.shared_expert(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm, self.moe = nn.LayerNorm(WIDTH), MoE()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.embed(ids) + self.position.weight
        return self.head(x + self.moe(self.norm(x).flatten(0, 1)).view_as(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"]).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum")
        return loss, (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        size = EXPERTS // ctx.axes["ep"]
        first = ctx.coords["ep"] * size
        for e in range(EXPERTS):
            if not first <= e < first + size:
                del model.moe.experts[str(e)]
        model.moe.group, model.moe.ranks = ctx.group("ep"), ctx.axes["ep"]
        return model

    def is_expert(self, name):
        return ".experts." in name

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, count = self.loss_sum(model, mine)
        dist.all_reduce(count)
        (loss / count).backward()
        for name, param in model.named_parameters():
            group = ctx.group("edp") if self.is_expert(name) else None
            dist.all_reduce(param.grad, group=group)


class Buggy(Clean):
    def is_expert(self, name):
        return "expert" in name


EXPECT = dict(
    right=[
        r"shared_expert",
        r"not (all.?)?(reduced|summed|added)|never (all.?)?(reduced|summed)|missing|partial|lack|only over|wrong group|other group|"
        r"differ\w* (between|on|across|over)|part of the (rows|ranks|gradient|tokens)|own (part|rows|ep)|over (only )?edp|"
        r"(without|lacks?|except|not over) .{0,20}\bep\b|no (all.?)?reduc|incomplete|half",
    ],
    place=[r"shared_expert", r"\bep\b", r"\bedp\b"],
    wrong=[
        r"counted (twice|\d times)|reduced (twice|again)",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"\bexperts\.\d\S* (is|are|was|were) (wrong|missing|(not|never) (reduced|summed))",
        r"router\S* (is|are|was|were) (wrong|missing|(not|never) (reduced|summed))",
        r"mean of (the )?(rank |ranks' )?means",
        r"tokens? (is|are|was|were) (dropped|lost)",
    ],
)
WHY = (
    "`shared_expert` contains `expert`, so its four parameters are summed over edp only and not over ep: the ranks of ep=0 and "
    "those of ep=1 hold different gradients, each that of the rows of two of the four ranks, which add up to the right one. "
    "Routed experts, router, embedding and head are exact."
)
