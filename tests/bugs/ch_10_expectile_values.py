"""Implicit Q-learning on logged transitions (value, critic and actor networks in one module), DDP
over three ranks, two micro-batches under no_sync.

The value network is fitted to an upper expectile of a frozen critic, the critic to the values of
the next states, and the actor by log likelihood weighted with the exponential advantage.

The bug: the expectile loss is called with value - critic where it was written for critic - value,
so that the weight tau falls on the wrong side and a lower expectile is fitted. After IQL ports in
which ``loss(diff, expectile)`` came from one repository and its caller from another.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, STATE, ACTIONS, HIDDEN = 11, 5, 3, 7
GAMMA, EXPECTILE, TEMPERATURE = 0.9, 0.8, 1.3


def network(outputs):
    return nn.Sequential(nn.Linear(STATE, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs))


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = network(1)
        self.critic = network(ACTIONS)
        self.actor = network(ACTIONS)
        self.target = network(ACTIONS).requires_grad_(False)

    def forward(self, state, following):
        return (
            self.value(state).squeeze(-1),
            self.value(following).squeeze(-1),
            self.critic(state),
            self.actor(state),
            self.target(state),
        )


def expectile_loss(difference):
    weight = torch.where(difference > 0, EXPECTILE, 1 - EXPECTILE)
    return weight * difference.square()


def losses(out, rows):
    value, following, critic, actor, target = out
    action = rows["action"][:, None]
    target = target.gather(1, action).squeeze(1)
    advantage = (target - value).detach()
    goal = rows["reward"] + GAMMA * (1 - rows["done"]) * following.detach()
    critic_loss = (critic.gather(1, action).squeeze(1) - goal).square()
    weight = (TEMPERATURE * advantage).exp().clamp(max=20.0)
    actor_loss = weight * F.cross_entropy(actor, rows["action"], reduction="none")
    return expectile_loss(target - value), critic_loss, actor_loss


def training_losses(out, rows):
    value, following, critic, actor, target = out
    action = rows["action"][:, None]
    target = target.gather(1, action).squeeze(1)
    error = value - target
    goal = rows["reward"] + GAMMA * (1 - rows["done"]) * following.detach()
    critic_loss = (critic.gather(1, action).squeeze(1) - goal).square()
    weight = (-TEMPERATURE * error.detach()).exp().clamp(max=20.0)
    actor_loss = weight * F.cross_entropy(actor, rows["action"], reduction="none")
    return expectile_loss(error), critic_loss, actor_loss


class Clean:
    losses = staticmethod(losses)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(111 + self.seed)
        return Learner()

    def batch(self):
        g = torch.Generator().manual_seed(112 + self.seed)
        return {
            "state": torch.randn(ROWS, STATE, generator=g),
            "following": torch.randn(ROWS, STATE, generator=g),
            "action": torch.randint(0, ACTIONS, (ROWS,), generator=g),
            "reward": torch.randn(ROWS, generator=g),
            "done": (torch.rand(ROWS, generator=g) < 0.2).float(),
        }

    def loss_sum(self, model, rows):
        out = model(rows["state"], rows["following"])
        return sum(loss.sum() for loss in losses(out, rows)), rows["state"].shape[0]

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        rank, world = ctx.coords["dp"], ctx.axes["dp"]
        mine = {k: torch.tensor_split(v, world)[rank] for k, v in batch.items()}
        for turn in range(2):
            rows = {k: torch.tensor_split(v, 2)[turn] for k, v in mine.items()}
            with contextlib.nullcontext() if turn else model.no_sync():
                out = model(rows["state"], rows["following"])
                total = sum(loss.sum() for loss in self.losses(out, rows))
                (total * world / ROWS).backward()


class Buggy(Clean):
    losses = staticmethod(training_losses)


EXPECT = dict(
    right=[
        r"expectile|asymmetr|\btau\b",
        (
            r"sign|wrong side|swap|revers|value ?- ?(target|critic|q)|v ?- ?q|negat|opposite|"
            r"lower expectile|exchang|1 ?- ?(tau|expectile)|minus|flip|invert|order of"
        ),
        r"value",
    ],
    place=[r"training_losses", r"expectile_loss", r"\berror\b", r"value ?- ?target", r"\.value\b"],
    wrong=[
        r"detach|stop[- ]?gradient",
        r"advantage weight|temperature|exp(onential)? (advantage|weight)|clamp",
        r"world|divis(or|ion)|no_sync|micro-?batch",
        r"terminal|\bdone\b|bootstrap|discount",
    ],
)

WHY = (
    "expectile_loss gives the weight 0.8 to positive differences and expects critic minus value, "
    "so that values below the critic cost more. training_losses hands it value minus target: the "
    "square is the same, but the weights 0.8 and 0.2 change places, row by row. Only the "
    "gradients of the value network are wrong (by a factor of 4 or 1/4 per row); the critic and "
    "the actor, whose weight gets its sign right, are correct, and so is DDP's reduction. A "
    "right cause says that the expectile (asymmetric) loss of the value has the sign of its "
    "difference reversed. The fix is expectile_loss(-error)."
)
