"""A small DeltaNet language model trained with context parallelism: the sequence of ten tokens is cut over three ranks (4, 3 and 3), two micro-batches of rows. Each rank first runs its own stretch from an
empty fast-weight state, which gives its end state S and its transition T = prod(I - beta k k^T); both are gathered (with the sum as adjoint), each rank makes its starting state from those of the ranks before it
and runs its stretch again from there. Gradients are summed over the ranks.

The bug: the starting state is the plain sum of the end states of the ranks before, as LASP does it for linear attention without decay; the delta rule also erases, so that the state of an earlier rank has to be carried
through the transitions of the ranks in between. After the context-parallel ports of flash-linear-attention (KDA/DeltaNet CP), where the linear-attention prefix sum was taken over at first.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, LENGTH, VOCABULARY, WIDTH, KEY, VALUE = 5, 10, 13, 7, 4, 5


class DeltaNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.q = nn.Linear(WIDTH, KEY, bias=False)
        self.k = nn.Linear(WIDTH, KEY, bias=False)
        self.v = nn.Linear(WIDTH, VALUE, bias=False)
        self.beta = nn.Linear(WIDTH, 1)
        self.out = nn.Linear(VALUE, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def project(self, ids):
        x = self.embed(ids)
        k = F.normalize(self.k(x) + 0.3, dim=-1)
        return x, self.q(x), k, 2 * self.v(x), self.beta(x).sigmoid()

    def recur(self, q, k, v, beta, state):
        outputs = []
        for t in range(q.shape[1]):
            kt, vt, bt = k[:, t], v[:, t], beta[:, t]
            old = (state @ kt[..., None]).squeeze(-1)
            state = state + (bt * (vt - old))[..., None] * kt[:, None]
            outputs.append((state @ q[:, t][..., None]).squeeze(-1))
        return torch.stack(outputs, 1), state

    def transition(self, k, beta):
        eye = torch.eye(KEY, dtype=k.dtype)
        product = eye.expand(len(k), KEY, KEY)
        for t in range(k.shape[1]):
            product = product @ (eye - beta[:, t, :, None] * k[:, t, :, None] * k[:, t, None])
        return product

    def logits(self, x, o):
        return self.head(torch.tanh(x + self.out(o)))

    def forward(self, ids):
        x, q, k, v, beta = self.project(ids)
        o, _ = self.recur(q, k, v, beta, x.new_zeros(len(ids), VALUE, KEY))
        return self.logits(x, o)


class GatherStates(torch.autograd.Function):
    """The states of all ranks, stacked; every rank uses them for its own tokens, so gradients are summed."""

    @staticmethod
    def forward(fctx, state, group):
        fctx.group = group
        parts = [torch.empty_like(state) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, state.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad[dist.get_rank(fctx.group)], None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return DeltaNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"]).flatten(0, 1)
        return F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum"), rows[
            "labels"
        ].numel()

    def starting_state(self, states, transitions, rank):
        state = torch.zeros_like(states[0])
        for source in range(rank):
            state = state @ transitions[source] + states[source]
        return state

    def shard_loss(self, model, ids, labels, ctx):
        group = ctx.group("cp")
        x, q, k, v, beta = model.project(ids)
        _, end = model.recur(q, k, v, beta, x.new_zeros(len(ids), VALUE, KEY))
        states = GatherStates.apply(end, group)
        transitions = GatherStates.apply(model.transition(k, beta), group)
        start = self.starting_state(states, transitions, ctx.coords["cp"])
        # states that a rank does not use still take part in the backward's all-reduce
        start = start + 0 * (states.sum() + transitions.sum())
        o, _ = model.recur(q, k, v, beta, start)
        return F.cross_entropy(model.logits(x, o).flatten(0, 1), labels.flatten(), reduction="sum")

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        shard = {n: t.tensor_split(ctx.axes["cp"], 1)[ctx.coords["cp"]] for n, t in batch.items()}
        for i in range(2):
            part = {n: t.tensor_split(2)[i] for n, t in shard.items()}
            loss = self.shard_loss(model, part["ids"], part["labels"], ctx)
            (loss / batch["labels"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("cp"))


class Buggy(Clean):
    def starting_state(self, states, transitions, rank):
        return states[:rank].sum(0)


EXPECT = dict(
    right=[
        r"state|starting_state|prefix|initial",
        r"transition|decay|carried|erase|propagat|transport|plain sum|sum of the (end )?states|composition|compos(ed|ing)|combin|I - beta|forward",
    ],
    place=[
        r"starting_state",
        r"states\[:rank\]",
        r"rank 2|last rank|third rank|cp.?2",
        r"GatherStates|transitions",
    ],
    wrong=[
        r"parameters?.{0,30}(not reduced|reduced twice|never reduced)|missing (all.?)?reduc",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|divisor|mean of means|token count",
        r"labels? (are )?shifted|position",
        r"(adjoint|backward) of (the )?(all.?)?gather.{0,30}(wrong|missing)|wrong group",
    ],
)
WHY = (
    "Rank 1 starts from the end state of rank 0, which is right; rank 2 has to start from S0 T1 + S1, where T1 is the transition of rank 1's tokens, but starts from S0 + S1. So the forward of rank 2 (its outputs and its loss) is wrong, "
    "and with it the gradients of its tokens and those that go back to the states of ranks 0 and 1; no gradient flows to the transitions at all. The reduction over the ranks and the counts are right. A right cause says that the starting state / "
    "prefix state of the last rank is combined wrongly (transition left out). Fix: fold state = state @ T_j + S_j over the ranks before."
)
