"""Soft actor-critic with the actor on one pool and each of the twin critics on a rank of another: the actor climbs the smaller of the two
values. After issues of distributed SAC implementations (rllib, cleanrl, rlpyt) on min(Q1, Q2) and FAULTS C16 (what a pool sends belongs to
something else): the actor adds up the gradients of both critics.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"actor": {"axes": {"dp": 2}}, "critics": {"axes": {"twin": 2}}}}
ROWS, STATE, ACTION, WIDTH = 9, 5, 3, 8


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.norm = nn.Linear(STATE, WIDTH), nn.LayerNorm(WIDTH)
        self.mean, self.spread = nn.Linear(WIDTH, ACTION), nn.Linear(WIDTH, ACTION)

    def forward(self, state, noise):
        x = F.silu(self.norm(self.hidden(state)))
        spread = self.spread(x).tanh()
        return (self.mean(x) + spread.exp() * noise).tanh(), -spread.sum(-1)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(STATE + ACTION, WIDTH + 2), nn.Linear(WIDTH + 2, 1)

    def forward(self, state, action):
        return self.out(torch.tanh(self.hidden(torch.cat([state, action], -1))))[:, 0]


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critics = Actor(), nn.ModuleDict({str(i): Critic() for i in range(2)})


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "actor": lambda model, rows: (self.both(model, rows)[0], len(rows["state"])),
            "critics": lambda model, rows: (self.both(model, rows)[1], len(rows["state"])),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return ActorCritic()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "state": torch.randn(ROWS, STATE, generator=g),
            "noise": torch.randn(ROWS, ACTION, generator=g),
            "action": torch.rand(ROWS, ACTION, generator=g) * 2 - 1,
            "return": torch.randn(ROWS, generator=g) + 1,
        }

    @staticmethod
    def frozen(critic, state, action):
        params = {k: p.detach() for k, p in critic.named_parameters()}
        return torch.func.functional_call(critic, params, (state, action))

    @staticmethod
    def td_loss(critic, rows):
        return (critic(rows["state"], rows["action"]) - rows["return"]).square().sum()

    def both(self, model, rows):
        action, log_prob = model.actor(rows["state"], rows["noise"])
        values = torch.stack(
            [self.frozen(c, rows["state"], action) for c in model.critics.values()]
        )
        actor = (0.2 * log_prob - values.amin(0)).sum()
        return actor, sum(self.td_loss(c, rows) for c in model.critics.values())

    def loss_sum(self, model, rows):
        return sum(self.both(model, rows)), len(rows["state"])

    def distribute(self, model, ctx):
        if ctx.pool == "actor":
            del model.critics
        else:
            del model.actor, model.critics[str(1 - ctx.pool_rank)]
        return model

    def towards_action(self, values, slopes):
        """d(smaller value)/d(action) from the two critics' values (2, rows) and slopes (2, rows, action)."""
        smaller = values.argmin(0)
        return slopes[smaller, torch.arange(len(smaller))]

    def step(self, model, batch, ctx):
        actors, critics = ctx.pools["actor"], ctx.pools["critics"]
        pieces = [
            {k: v.tensor_split(len(actors))[i] for k, v in batch.items()}
            for i in range(len(actors))
        ]
        if ctx.pool == "critics":
            (critic,) = model.critics.values()
            for source, rows in zip(actors, pieces):
                action = torch.empty_like(rows["action"])
                dist.recv(action, source)
                value = self.frozen(critic, rows["state"], action.requires_grad_())
                (slope,) = torch.autograd.grad(value.sum(), action)
                dist.send(value.detach(), source)
                dist.send(slope.contiguous(), source)
            (self.td_loss(critic, batch) / ROWS).backward()
            return
        rows = pieces[ctx.pool_rank]
        action, log_prob = model.actor(rows["state"], rows["noise"])
        values = torch.empty(2, len(action), dtype=ctx.dtype)
        slopes = torch.empty(2, *action.shape, dtype=ctx.dtype)
        for i, critic in enumerate(critics):
            dist.send(action.detach(), critic)
            dist.recv(values[i], critic)
            dist.recv(slopes[i], critic)
        slope = self.towards_action(values, slopes)
        torch.autograd.backward([action, 0.2 * log_prob.sum() / ROWS], [-slope / ROWS, None])
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def towards_action(self, values, slopes):
        return slopes.sum(0)


EXPECT = dict(
    right=[
        r"actor",
        r"backward|gradient (of|at|into|entering|that)|incoming|critic|action|received|send|sent|boundary|term|rows?|direction",
    ],
    place=[r"actor"],
    wrong=[
        r"critics\.\S* (is|are|was|were|has|have) (a )?(wrong|missing)",
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"(factor|times|multiplied by) (2|two)\b.{0,30}(all|every|everywhere)|exactly (twice|double)",
        r"reduced (twice|again)",
    ],
)
WHY = (
    "The actor's action gets the slopes of both critics instead of that of the critic with the smaller value, so on each row the "
    "other critic's slope is added: actor.* is wrong on both actor ranks, not by a common factor and without any fault in the "
    "reductions. The critics' own gradients, the actions and the values are right."
)
