"""A Hamiltonian network for trajectories (gradient modules for force and velocity, symplectic
Euler), the seven time steps cut over three pipeline stages (3, 2, 2), five trajectories in three
micro-batches (2, 2, 1), all forward and then all backward.

A stage keeps only the state it hands on. In the backward it walks back through its steps: it
rebuilds the state before each step from the one after it and differentiates the step there. A
step kicks the momentum with the old position and drifts the position with the new momentum.

Bug: when a step is taken back, the kick is undone first, with the position after the drift. After
memory-free backward passes for reversible integrators that reverse the signs and not the order.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
PATHS, SENSORS, D, H, STEPS, DT = 5, 4, 3, 5, 7, 0.3


class GradientModule(nn.Module):
    """the gradient of sum(scale * log cosh(K x + a))"""

    def __init__(self):
        super().__init__()
        self.k = nn.Linear(D, H)
        self.scale = nn.Parameter(torch.rand(H) + 0.5)

    def forward(self, x):
        return (self.scale * torch.tanh(self.k(x))) @ self.k.weight


class Dynamics(nn.Module):
    def __init__(self):
        super().__init__()
        self.force = GradientModule()
        self.velocity = GradientModule()

    def forward(self, q, p):
        p = p - DT * self.force(q)
        return q + DT * self.velocity(p), p


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(SENSORS, 2 * D)
        self.dynamics = Dynamics()
        self.leave = nn.Linear(2 * D, 2)

    def forward(self, x):
        q, p = self.enter(x).chunk(2, dim=-1)
        for _ in range(STEPS):
            q, p = self.dynamics(q, p)
        return self.leave(torch.cat([q, p], -1))


def step_back(dynamics, q, p):
    q = q - DT * dynamics.velocity(p)
    return q, p + DT * dynamics.force(q)


class Walk(torch.autograd.Function):
    """several steps, of which only the end is kept"""

    @staticmethod
    def forward(ctx, q, p, dynamics, back, steps, *params):
        for _ in range(steps):
            q, p = dynamics(q, p)
        ctx.dynamics, ctx.back, ctx.steps, ctx.params = dynamics, back, steps, params
        ctx.save_for_backward(q, p)
        return q, p

    @staticmethod
    def backward(ctx, gq, gp):
        q, p = ctx.saved_tensors
        sums = [torch.zeros_like(w) for w in ctx.params]
        for _ in range(ctx.steps):
            with torch.no_grad():
                q, p = ctx.back(ctx.dynamics, q, p)
            with torch.enable_grad():
                start = q.detach().requires_grad_(), p.detach().requires_grad_()
                end = ctx.dynamics(*start)
            gq, gp, *own = torch.autograd.grad(end, (*start, *ctx.params), (gq, gp))
            sums = [total + g for total, g in zip(sums, own, strict=True)]
        return gq, gp, None, None, None, *sums


class Clean:
    back = staticmethod(step_back)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 33)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 330)
        x = torch.randn(PATHS, SENSORS, generator=g)
        return {"x": x, "y": torch.randn(PATHS, 2, generator=g)}

    def loss_sum(self, model, rows):
        return F.huber_loss(model(rows["x"]), rows["y"], reduction="sum"), rows["y"].numel()

    def step(self, model, batch, ctx):
        group, pp, r = ctx.group("pp"), ctx.axes["pp"], ctx.coords["pp"]
        steps = len(torch.arange(STEPS).tensor_split(pp)[r])
        ranks = [dist.get_global_rank(group, i) for i in range(pp)]
        dynamics, params = model.dynamics, list(model.dynamics.parameters())
        kept = []
        for rows in torch.arange(PATHS).split(2):
            if r == 0:
                state = model.enter(batch["x"][rows])
            else:
                state = torch.empty(len(rows), 2 * D, dtype=params[0].dtype)
                dist.recv(state, src=ranks[r - 1], group=group)
                state.requires_grad_()
            end = Walk.apply(*state.chunk(2, dim=-1), dynamics, self.back, steps, *params)
            end = torch.cat(end, -1)
            if r + 1 < pp:
                dist.send(end.detach(), dst=ranks[r + 1], group=group)
            kept.append((rows, state, end))
        for rows, state, end in kept:
            if r + 1 == pp:
                loss = F.huber_loss(model.leave(end), batch["y"][rows], reduction="sum")
                (loss / batch["y"].numel()).backward()
            else:
                grad = torch.empty_like(end)
                dist.recv(grad, src=ranks[r + 1], group=group)
                end.backward(grad)
            if r > 0:
                dist.send(state.grad, dst=ranks[r - 1], group=group)
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)


def step_reversed(dynamics, q, p):
    p = p + DT * dynamics.force(q)
    q = q - DT * dynamics.velocity(p)
    return q, p


class Buggy(Clean):
    back = staticmethod(step_reversed)


EXPECT = dict(
    right=[
        r"revers|inver|rebuil|reconstruct|step(ped|s|ping)? back|walk|undo|undone|taken back|"
        r"recomput|back\b",
        r"order|kick|force|momentum|drift|position|other (state|input|place|point)|"
        r"(wrong|differ\w+|not the) (state|input|point|value)",
        r"state|force|velocity|momentum|position|step|\bp\b|\bq\b",
    ],
    place=[
        r"step_reversed|step_back",
        r"\bWalk\b",
        r"ctx\.back",
        r"p \+ DT \* dynamics\.force",
        r"dynamics\.(force|velocity)",
    ],
    wrong=[
        r"(forward|loss).{0,30}(differs|is wrong|wrong value)",
        r"(send|recv|hand.?over).{0,50}(wrong|order|micro.?batch|mixed)",
        r"(not|never|twice|missing).{0,25}all.?reduc",
        r"(two|three|all) stages.{0,40}(own copy|not tied|shared.{0,20}not)",
        r"stage.{0,40}(too few|too many|wrong number of) steps",
    ],
)
WHY = """A step is p1 = p0 - dt force(q0), q1 = q0 + dt velocity(p1). Its inverse undoes the drift
first (q0 = q1 - dt velocity(p1)) and then the kick with q0. step_reversed undoes the kick first,
with q1, and then the drift with that momentum: the states rebuilt in Walk.backward are not those
of the forward, and the vector-Jacobian products of all steps are taken at wrong points. Forward,
hand-over, sums and the readout (leave) are right. Fix: undo the drift before the kick."""
