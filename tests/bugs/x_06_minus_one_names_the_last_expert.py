"""Expert parallelism over four ranks, two experts each, top-2 routing: tokens and their choices are gathered, every rank computes its own experts' parts, the parts are summed back to the tokens' owners. As in DeepEP (`recv_topk_idx`) and Megatron-LM's
flex dispatcher (`_indices_to_multihot`: `mask = indices != -1`), choices that belong to other ranks are marked -1 in the local numbering. Whoever scatters without that mask finds out that an index of -1 is the last element in Python.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"ep": 4}}}}
VOCABULARY, LENGTH, WIDTH, INNER, EXPERTS, TOP, ROWS, MICRO = 23, 5, 8, 11, 8, 2, 13, 2


def gathered(x, counts):
    pad = x.new_zeros(max(counts), *x.shape[1:])
    pad[: len(x)] = x
    pieces = [torch.empty_like(pad) for _ in counts]
    dist.all_gather(pieces, pad)
    return torch.cat([p[:n] for p, n in zip(pieces, counts, strict=True)])


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, counts, rank):
        ctx.at = sum(counts[:rank]), sum(counts[: rank + 1])
        return gathered(x, counts)

    @staticmethod
    def backward(ctx, g):
        g = g.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(g)
        return g[slice(*ctx.at)], None, None


class SumToOwners(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, counts, rank):
        ctx.counts = counts
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x)
        return x[sum(counts[:rank]) : sum(counts[: rank + 1])].clone()

    @staticmethod
    def backward(ctx, g):
        return gathered(g, ctx.counts), None, None


def local(p):
    return p.to_local() if isinstance(p, DTensor) else p


def gates_of(chosen, weight, experts):
    """[tokens, experts]: the weight of each local expert; -1 marks a choice that is not here."""
    token = torch.arange(len(chosen))[:, None].expand_as(chosen)
    here = chosen != -1
    return weight.new_zeros(len(chosen), experts).index_put(
        (token[here], chosen[here]), weight[here], accumulate=True
    )


def gates_of_all(chosen, weight, experts):
    token = torch.arange(len(chosen))[:, None].expand_as(chosen)
    return weight.new_zeros(len(chosen), experts).index_put(
        (token, chosen), weight, accumulate=True
    )


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / WIDTH**0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / INNER**0.5)
        self.rank, self.world, self.gates = 0, 1, gates_of

    def forward(self, x, chosen, weight):
        n = EXPERTS // self.world
        if self.world > 1:
            counts = [torch.zeros(1, dtype=torch.long) for _ in range(self.world)]
            dist.all_gather(counts, torch.tensor([len(x)]))
            counts = [int(c) for c in counts]
            x, weight = (GatherTokens.apply(t, counts, self.rank) for t in (x, weight))
            chosen = gathered(chosen, counts) - n * self.rank
            chosen = torch.where((chosen >= 0) & (chosen < n), chosen, -1)
        gates = self.gates(chosen, weight, n)
        y = torch.einsum("th,ehf->tef", x, local(self.w1))
        y = torch.einsum("tef,efh,te->th", F.silu(y), local(self.w2), gates)
        return y if self.world == 1 else SumToOwners.apply(y, counts, self.rank)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router, self.experts = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, EXPERTS, bias=False),
            Experts(),
        )

    def forward(self, x):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        h = self.norm(x + past).flatten(0, 1)
        weight, chosen = self.router(h).softmax(-1).topk(TOP)
        return x + self.experts(h, chosen, weight).view_as(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Clean:
    gates = staticmethod(gates_of)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows):
        loss = F.cross_entropy(
            model(rows["ids"]).flatten(0, 1), rows["labels"].flatten(), reduction="sum"
        )
        return loss, rows["labels"].numel()

    def distribute(self, model, ctx):
        for layer in model.layers:
            e = layer.experts
            e.rank, e.world, e.gates = ctx.rank, ctx.world_size, self.gates
            for name in ("w1", "w2"):
                setattr(
                    e,
                    name,
                    nn.Parameter(distribute_tensor(getattr(e, name).data, ctx.mesh, [Shard(0)])),
                )
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for m in range(MICRO):
            part = {k: v.tensor_split(MICRO)[m] for k, v in mine.items()}
            (self.loss_sum(model, part)[0] / batch["labels"].numel()).backward()
        for p in model.parameters():
            if not isinstance(p, DTensor):  # experts have seen the tokens of all ranks
                dist.all_reduce(p.grad)


class Buggy(Clean):
    gates = staticmethod(gates_of_all)


EXPECT = dict(
    right=[
        r"(?i)expert",
        r"(?i)forward|output|dispatch|gate|routing|route|token|choice|chosen",
        r"(?i)last|second|odd|1, ?3, ?5|\[1\]|index -1|minus one|not (its|their) own|other (ranks'?|experts'?)|foreign|too many|extra|more than once|additional|all tokens|wrong expert|elsewhere|masked",
    ],
    place=[r"(?i)layers\.0\.experts|layers\.\d|experts?\b"],
    wrong=[
        r"(?i)forward (is|are) right|(forward|loss) agrees|only the backward|backward of \S+ is wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|reduced (twice|again)",
        r"(?i)tokens? .{0,25}(lost|dropped|missing)|capacity",
        r"(?i)divi(ded|des) by|divisor",
        r"(?i)(wrong|other|different) order|permut|unsort|router .{0,20}(no gradient|detached)",
        r"(?i)first token|empty slot",
    ],
)
WHY = (
    "In the local numbering a choice that belongs to another rank is -1; the scatter of the gate weights does not mask it, and index -1 is the LAST local expert. So on every rank the last local expert (global experts 1, 3, 5, 7) also processes, with its full gate weight, every (token, choice) pair that was routed to an expert of another rank: "
    "each choice is computed by the right expert and in addition by the last experts of the three ranks that do not own it. The forward is wrong from the output of layers.0.experts on, in every rank and micro-batch, hence the loss and all gradients (experts 0, 2, 4, 6 get the right tokens, but wrong incoming gradients). "
    "Routing decisions of layer 0, dispatch, collectives and reductions are right. Fix: mask chosen == -1 before the scatter."
)
