"""MuZero's unrolled model trained with the unroll steps cut over a pipeline of three ranks: root and steps 1-2 on rank 0, 3-4 on rank 1, 5 on rank 2. Each rank has a copy of the shared networks; the gradients
are summed over the ranks at the end. As in MuZero, the gradient that enters the dynamics function through the hidden state is halved at each step. Seven rows in three micro-batches: all forwards, then all
backwards, with the hidden state sent on and its gradient sent back.

The bug: the loop halves the state's gradient after every step, the last of a stage, too, before it is sent; and the receiving stage halves what it received, again. After the class of reports where scaling
hooks (gradient reversal, MuZero's scale_gradient, LayerDrop scales) are set on both sides of a pipeline's cut.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
SEEN, ACTIONS, WIDTH, STEPS, ROWS, MICRO = 4, 3, 6, 5, 7, 3
STAGES = [(0, 2), (2, 4), (4, 5)]


class ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, by):
        fctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(fctx, grad):
        return grad * fctx.by, None


class World(nn.Module):
    def __init__(self):
        super().__init__()
        self.represent = nn.Linear(SEEN, WIDTH)
        self.dynamics = nn.Linear(WIDTH + ACTIONS, WIDTH)
        self.reward = nn.Linear(WIDTH, 1)
        self.value = nn.Linear(WIDTH, 1)
        self.policy = nn.Linear(WIDTH, ACTIONS)

    def root(self, seen):
        return torch.tanh(self.represent(seen))

    def advance(self, state, action):
        return (
            torch.tanh(
                self.dynamics(torch.cat([state, F.one_hot(action, ACTIONS).to(state.dtype)], -1))
            )
            + 0.5 * state
        )

    def errors(self, state, rows, at):
        """Loss of the predictions at one step, step 0 being the root."""
        log_policy = self.policy(state).log_softmax(-1)
        total = (self.value(state)[:, 0] - rows["value"][:, at]).square().sum() - (
            rows["visits"][:, at] * log_policy
        ).sum()
        if at:
            total = total + (self.reward(state)[:, 0] - rows["reward"][:, at - 1]).square().sum()
        return total if at == 0 else total / STEPS


def unroll(model, state, rows, first, last):
    total = 0.0
    for n in range(first, last):
        state = model.advance(state, rows["action"][:, n])
        total = total + model.errors(state, rows, n + 1)
        state = ScaleGradient.apply(state, 0.5)
    return state, total


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return World()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "seen": torch.randn(ROWS, SEEN, generator=g),
            "action": torch.randint(ACTIONS, (ROWS, STEPS), generator=g),
            "reward": torch.randn(ROWS, STEPS, generator=g),
            "value": torch.randn(ROWS, STEPS + 1, generator=g),
            "visits": torch.rand(ROWS, STEPS + 1, ACTIONS, generator=g).softmax(-1),
        }

    def loss_sum(self, model, rows):
        state = model.root(rows["seen"])
        _, total = unroll(model, state, rows, 0, STEPS)
        return model.errors(state, rows, 0) + total, len(state)

    def entrance(self, received):
        return received

    def forward_stage(self, model, part, ctx):
        stage, group = ctx.rank, ctx.group("pp")
        if stage == 0:
            leaf, state = None, model.root(part["seen"])
            loss = model.errors(state, part, 0)
        else:
            leaf = part["value"].new_empty(len(part["value"]), WIDTH)
            dist.recv(leaf, stage - 1, group=group)
            leaf.requires_grad_()
            state, loss = self.entrance(leaf), 0.0
        state, more = unroll(model, state, part, *STAGES[stage])
        if stage < len(STAGES) - 1:
            dist.send(state.detach().contiguous(), stage + 1, group=group)
        return leaf, state, (loss + more) / ROWS

    def backward_stage(self, leaf, state, loss, ctx):
        stage, group = ctx.rank, ctx.group("pp")
        if stage < len(STAGES) - 1:
            grad = torch.empty_like(state)
            dist.recv(grad, stage + 1, group=group)
            torch.autograd.backward([loss, state], [None, grad])
        else:
            loss.backward()
        if leaf is not None:
            dist.send(leaf.grad, stage - 1, group=group)

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        parts = [{k: x.tensor_split(MICRO)[n] for k, x in batch.items()} for n in range(MICRO)]
        kept = [self.forward_stage(model, part, ctx) for part in parts]
        for leaf, state, loss in kept:
            self.backward_stage(leaf, state, loss, ctx)
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=ctx.group("pp"))


class Buggy(Clean):
    def entrance(self, received):
        return ScaleGradient.apply(received, 0.5)


EXPECT = dict(
    right=[
        r"half|halv|0\.5|scale|twice|factor|smaller|ScaleGradient|entrance",
        r"stage|received|boundary|hidden state|sent back|entrance|pipeline|leaf|hand",
    ],
    place=[
        r"entrance",
        r"ScaleGradient",
        r"forward_stage",
        r"backward_stage",
        r"received|leaf",
        r"unroll",
    ],
    wrong=[
        r"parameters?.{0,30}(not (been )?(all.?)?reduced|reduced (twice|again))|missing (all.?)?reduc|wrong group",
        r"divisor|mean of means|micro.?batch(es)? .{0,20}(lost|dropped|overwritten|swapped|mixed)|only the last micro.?batch",
        r"forward .{0,20}is wrong|loss (value )?is wrong|(wrong|other) rows|detach|cut off|no gradient is sent",
        r"rank 2.{0,30}own gradient is wrong|last stage.{0,30}(computes|is) wrong",
    ],
)
WHY = (
    "The loop in unroll halves the gradient of the state after every step, also after the last one of a stage; Buggy.entrance halves it once more on ranks 1 and 2, for what they received. So the gradient sent back "
    "over each of the two cuts is half as large as it should be: what steps 3-5 say to root and steps 1-2 is halved, what step 5 says to those is quartered. Forward and losses are right on all ranks; rank 2's own "
    "parameter gradients are right, those of rank 0 and rank 1 lack a part (represent, dynamics mainly); the heads' gradients are right, the final sum over the ranks as well. Fix: entrance returns what it received."
)
