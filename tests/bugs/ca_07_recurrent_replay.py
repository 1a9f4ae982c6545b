"""Recurrent replay (R2D2): a GRU Q network is run over stored sequences, the first steps as burn-in that only warms up the state, the others trained on n-step targets that are given. The time axis is cut over three ranks like a pipeline: each
rank runs its own steps and sends the state to the next; in the backward the state's gradient comes back the other way. Two micro-batches of sequences, gradients summed over the ranks.

The bug: the steps of the burn-in are left out of the loss but their state is not cut off, so that gradient flows on through it into the burn-in.
After R2D2 reimplementations whose burn-in runs with gradients (mask on the loss in place of no_grad / detach).
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"time": 3}}}}
ROWS, STEPS, BURN_IN, FEATURES, WIDTH, ACTIONS = 7, 10, 2, 4, 6, 3


class RecurrentQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(FEATURES, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, 1)
        self.advantage = nn.Linear(WIDTH, ACTIONS)

    def advance(self, x, state):
        return self.cell(torch.tanh(self.encode(x)), state)

    def q(self, state):
        a = self.advantage(state)
        return self.value(state) + a - a.mean(-1, keepdim=True)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return RecurrentQ()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "frames": torch.randn(ROWS, STEPS, FEATURES, generator=g),
            "actions": torch.randint(ACTIONS, (ROWS, STEPS), generator=g),
            "targets": torch.randn(ROWS, STEPS, generator=g),
            "stored": torch.randn(ROWS, WIDTH, generator=g).tanh(),
        }

    @staticmethod
    def td_error(model, state, rows, t):
        chosen = model.q(state).gather(1, rows["actions"][:, t, None])[:, 0]
        return (chosen - rows["targets"][:, t]).square().sum() / (STEPS - BURN_IN)

    def loss_sum(self, model, rows):
        state, loss = rows["stored"], 0
        for t in range(STEPS):
            if t == BURN_IN:
                state = state.detach()
            state = model.advance(rows["frames"][:, t], state)
            if t >= BURN_IN:
                loss = loss + self.td_error(model, state, rows, t)
        return loss, len(rows["stored"])

    def unroll(self, model, rows, state, begin, end):
        loss = state.new_zeros(())
        for t in range(begin, end):
            if t < BURN_IN:
                with torch.no_grad():
                    state = model.advance(rows["frames"][:, t], state)
            else:
                state = model.advance(rows["frames"][:, t], state)
                loss = loss + self.td_error(model, state, rows, t)
        return loss, state

    def step(self, model, batch, ctx):
        rank, world = ctx.rank, ctx.world_size
        begin, end = STEPS * rank // world, STEPS * (rank + 1) // world
        for p in model.parameters():
            p.grad = None
        for m in range(2):
            rows = {k: v.tensor_split(2)[m] for k, v in batch.items()}
            first = rows["stored"].clone()
            if rank:
                dist.recv(first, rank - 1)
                first.requires_grad_()
            loss, last = self.unroll(model, rows, first, begin, end)
            if rank < world - 1:
                dist.send(last.detach().contiguous(), rank + 1)
                back = torch.empty_like(last)
                dist.recv(back, rank + 1)
                torch.autograd.backward([loss / ROWS, last], [None, back])
            else:
                (loss / ROWS).backward()
            if rank:
                dist.send(first.grad.contiguous(), rank - 1)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("time"))


class Buggy(Clean):
    def unroll(self, model, rows, state, begin, end):
        loss = state.new_zeros(())
        for t in range(begin, end):
            state = model.advance(rows["frames"][:, t], state)
            if t >= BURN_IN:
                loss = loss + self.td_error(model, state, rows, t)
        return loss, state


EXPECT = dict(
    right=[
        r"burn.?in|detach|no_grad|stop.?grad|cut off|warm.?up|first (two |2 )?steps|state",
        r"gradient|backward|graph|flows?|learn|trained|leak|backprop",
    ],
    place=[r"unroll", r"burn.?in", r"advance|cell|encode", r"\bstate\b", r"detach|no_grad"],
    wrong=[
        r"(missing|lacks?|without|never|not) (all.?)?reduc|reduced twice|not reduced",
        r"(state|hand.?over|boundar).{0,40}gradient.{0,30}(not sent|lost|never sent|missing between)|send.{0,20}(missing|lost)",
        r"divisor|mean of means|counted in the loss|loss.{0,20}(burn.?in steps are counted)",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"ranks? (1|2|one|two).{0,30}(is|are) (the|at) (cause|fault)",
    ],
)
WHY = (
    "The loss of the single process detaches the state after two steps of burn-in. Those lie in rank 0's steps (0, 1 and 2), and its unroll runs them with gradients and only leaves them out of the loss, so that the gradient of all later steps, "
    "its own and what rank 1 sends back, goes on through the state into steps 0 and 1, and encode and cell get too much; loss and forward are right, and so are value and advantage. Only rank 0's share is wrong, in both micro-batches, and the sum "
    "brings it to all. A right cause says that the state is not cut (detach / no_grad) after the burn-in. Fix: run the burn-in under no_grad."
)
