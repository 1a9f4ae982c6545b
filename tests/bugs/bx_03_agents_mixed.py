"""QMIX with the agents dealt out: five agents over two ranks (3 and 2), times two data parallel ranks. Each agent's utility comes from a shared network; a hypernetwork makes non-negative mixing weights from the state,
and q_tot = |w2| . elu(sum_a q_a |w1_a| + b1) + b2. A rank computes the utilities and the mixing weights of its agents, the sum over the agents is reduced over the agent axis (identity as its backward, as what follows is
replicated). Three micro-batches.

The bug: the activation is applied to each rank's partial sum, before the reduction over the ranks, as a fused matmul+activation epilogue in front of a row-parallel all-reduce does. After reports on activations fused
into row-parallel layers (the reduction must come before any non-linearity), e.g. in home-made tensor parallel MLPs.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "agent": 2}}}}
ROWS, AGENTS, OBS, STATE, ACTIONS, WIDTH, MIX = 7, 5, 4, 6, 3, 5, 6


class SumOverAgents(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class QMix(nn.Module):
    def __init__(self):
        super().__init__()
        self.agent = nn.Sequential(nn.Linear(OBS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, ACTIONS))
        self.hyper_w1 = nn.Linear(STATE, AGENTS * MIX)
        self.hyper_b1 = nn.Linear(STATE, MIX)
        self.hyper_w2 = nn.Linear(STATE, MIX)
        self.hyper_b2 = nn.Sequential(nn.Linear(STATE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def partial_mix(self, rows, agents):
        q = self.agent(rows["obs"][:, agents])
        q = q.gather(-1, rows["actions"][:, agents, None]).squeeze(-1)
        w1 = self.hyper_w1(rows["state"]).abs().unflatten(-1, (AGENTS, MIX))[:, agents]
        return torch.einsum("ba,bam->bm", q, w1)

    def total(self, hidden, state):
        return (hidden * self.hyper_w2(state).abs()).sum(-1) + self.hyper_b2(state).squeeze(-1)

    def forward(self, rows):
        hidden = F.elu(self.partial_mix(rows, slice(0, AGENTS)) + self.hyper_b1(rows["state"]))
        return self.total(hidden, rows["state"])


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return QMix()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "obs": torch.randn(ROWS, AGENTS, OBS, generator=g),
            "state": torch.randn(ROWS, STATE, generator=g),
            "actions": torch.randint(ACTIONS, (ROWS, AGENTS), generator=g),
            "target": torch.randn(ROWS, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows) - rows["target"]).square().sum(), len(rows["target"])

    def hidden(self, model, rows, agents, ctx):
        partial = model.partial_mix(rows, agents)
        mixed = SumOverAgents.apply(partial, ctx.group("agent"))
        return F.elu(mixed + model.hyper_b1(rows["state"]))

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        own = torch.arange(AGENTS).tensor_split(ctx.axes["agent"])[ctx.coords["agent"]]
        mine = {k: x.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, x in batch.items()}
        for i in range(3):
            rows = {k: x.tensor_split(3)[i] for k, x in mine.items()}
            q_tot = model.total(self.hidden(model, rows, own, ctx), rows["state"])
            ((q_tot - rows["target"]).square().sum() / ROWS).backward()
        for name, p in model.named_parameters():
            if name.startswith(("agent.", "hyper_w1.")):
                dist.all_reduce(p.grad, group=ctx.group("agent"))
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def hidden(self, model, rows, agents, ctx):
        partial = F.elu(model.partial_mix(rows, agents))
        mixed = SumOverAgents.apply(partial, ctx.group("agent"))
        return mixed + model.hyper_b1(rows["state"])


EXPECT = dict(
    right=[
        r"activation|elu|non.?linear|forward|partial",
        r"before|partial|order|each rank|local|own|forward|reduc|sum",
    ],
    place=[r"hidden", r"elu", r"SumOverAgents", r"partial_mix|mixed", r"all.?reduce"],
    wrong=[
        r"parameters?.{0,30}(not reduced|reduced twice|never reduced)|missing (all.?)?reduc",
        r"(adjoint|backward) of (the )?(all.?)?reduce.{0,30}(wrong|missing)|wrong group",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|divisor|mean of means",
        r"(wrong|other) rows",
    ],
)
WHY = (
    "elu(sum of all agents' terms + b1) is the mixer's hidden layer; Buggy takes elu of the three (or two) own agents' sum on each rank, adds the two results over the agent axis and then b1. So hidden, q_tot and the loss are wrong in the forward on all ranks, "
    "and all gradients with them (agent network, all hypernetworks). A right cause says that the activation is applied to partial sums / before the all-reduce over the agents, or that what enters the all-reduce is wrong in the forward. "
    "The parameters' reductions, divisor and the identity backward are right. Fix: reduce first, then add b1 and apply elu."
)
