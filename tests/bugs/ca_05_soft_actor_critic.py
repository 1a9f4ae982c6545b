"""Soft actor-critic on replayed transitions: a squashed Gaussian actor and two Q functions in one step. The critics regress on given targets; the actor's term (entropy against the smaller Q) reads the critics through detached parameters.
Data parallel by hand over three ranks with uneven rows, two micro-batches each; after the last one the gradients of both networks go through one all-reduce per tensor, in the order of their names.

The bug: the tensors to reduce are collected in one dict by the name that each has within its own network; actor and critics have names in common, and the later one takes the place of the earlier.
After multi-network trainers that merge named_parameters() of their networks (Horovod's "duplicate names" report, and the like of it in RL code bases).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, OBSERVATION, ACTION, WIDTH, TEMPERATURE = 11, 5, 2, 6, 0.2


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(OBSERVATION, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.mean = nn.Linear(WIDTH, ACTION)
        self.log_std = nn.Linear(WIDTH, ACTION)

    def forward(self, observation, noise):
        h = self.body(observation)
        mean, log_std = self.mean(h), self.log_std(h).tanh()
        raw = mean + log_std.exp() * noise
        log_prob = (-0.5 * noise.square() - log_std).sum(-1)
        log_prob = log_prob - (2 * (0.6931471805599453 - raw - F.softplus(-2 * raw))).sum(-1)
        return raw.tanh(), log_prob


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(OBSERVATION + ACTION, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.q_1 = nn.Linear(WIDTH, 1)
        self.q_2 = nn.Linear(WIDTH, 1)

    def forward(self, observation, action):
        h = self.body(torch.cat([observation, action], -1))
        return torch.cat([self.q_1(h), self.q_2(h)], -1)


class SoftActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = Actor(), Critic()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return SoftActorCritic()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "observation": torch.randn(ROWS, OBSERVATION, generator=g),
            "action": torch.rand(ROWS, ACTION, generator=g) * 2 - 1,
            "target": torch.randn(ROWS, 1, generator=g),
            "noise": torch.randn(ROWS, ACTION, generator=g),
        }

    def loss_sum(self, model, rows):
        q = model.critic(rows["observation"], rows["action"])
        critic_loss = (q - rows["target"]).square().sum()
        action, log_prob = model.actor(rows["observation"], rows["noise"])
        frozen = {k: p.detach() for k, p in model.critic.named_parameters()}
        smaller = functional_call(model.critic, frozen, (rows["observation"], action)).amin(-1)
        return critic_loss + (TEMPERATURE * log_prob - smaller).sum(), len(q)

    def to_reduce(self, model):
        return dict(model.named_parameters())

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for p in model.parameters():
            p.grad = None
        for m in range(2):
            part = {k: v.tensor_split(2)[m] for k, v in mine.items()}
            loss, _ = self.loss_sum(model, part)
            (loss / ROWS).backward()
        parameters = self.to_reduce(model)
        for name in sorted(parameters):
            dist.all_reduce(parameters[name].grad, group=ctx.group("dp"))


class Buggy(Clean):
    def to_reduce(self, model):
        parameters = {}
        for net in (model.actor, model.critic):
            parameters.update(net.named_parameters())
        return parameters


EXPECT = dict(
    right=[
        r"not reduced|never reduced|(not|never|without|missing|lacks?|no) .{0,40}(all.?)?reduc|un.?reduced|left out|skipped|stays? local|own (rows|share|part|gradient)|local gradient|only .{0,30}(its|their) own",
        r"actor|body",
    ],
    place=[
        r"actor\.body",
        r"actor",
        r"to_reduce",
        r"named_parameters|parameters\.update|dict|names?",
    ],
    wrong=[
        r"critic\.(body|q_)[^ ]* .{0,40}(not|never|missing).{0,15}reduc|reduced twice|counted twice",
        r"actor\.(mean|log_std)[^ ]* .{0,40}(not|never|missing).{0,15}reduc",
        r"wrong divisor|mean of means|only the last micro.?batch|micro.?batch.{0,20}(lost|dropped)",
        r"detach|actor.{0,30}hears|no gradient reaches|squash",
    ],
)
WHY = (
    "Both networks call their trunk body, so named_parameters() of actor and critic share body.0.weight, body.0.bias, body.2.weight and body.2.bias; update() puts the critic's tensors over the actor's. The four tensors of actor.body are in no all-reduce, and each "
    "rank is left with the gradient of its own four or three rows (over 11); actor.mean, actor.log_std and all of the critic are right. A right cause says that actor.body is not reduced over dp. Fix: name by the whole model "
    "or iterate over the parameters themselves."
)
