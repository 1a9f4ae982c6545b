"""Soft actor-critic with a learned temperature; critic, actor and temperature are trained on one batch of transitions, gradients summed by
hand. After reports on multi-GPU SAC and RLHF trainers that keep log_alpha as a bare parameter beside their (wrapped) networks (FAULTS class
C05: a replicated parameter that nobody sums): the loop goes over the networks.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

TOPOLOGY = {"pools": {"learner": {"axes": {"dp": 3}}}}
ROWS, STATE, ACTION, GAMMA, TARGET_ENTROPY = 13, 5, 2, 0.9, -2.0


class Critic(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(STATE + ACTION, 9), nn.SiLU(), nn.LayerNorm(9), nn.Linear(9, 1))


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(STATE, 8), nn.Tanh(), nn.Linear(8, 2 * ACTION))
        self.critic, self.target = Critic(), Critic().requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(-0.7))

    def act(self, state, noise):
        mean, log_std = self.actor(state).chunk(2, -1)
        log_std = log_std.tanh()
        raw = mean + log_std.exp() * noise
        log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        action = raw.tanh()
        return action, (log_prob - (1 - action.square() + 1e-4).log()).sum(-1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            name: lambda m, r, i=i: (self.sums(m, r)[i], len(r["state"]))
            for i, name in enumerate(("critic", "actor", "temperature"))
        }

    def build(self):
        torch.manual_seed(self.seed)
        return Agent()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "state": torch.randn(ROWS, STATE, generator=g),
            "action": torch.rand(ROWS, ACTION, generator=g) * 2 - 1,
            "reward": torch.randn(ROWS, generator=g),
            "next": torch.randn(ROWS, STATE, generator=g),
            "done": torch.rand(ROWS, generator=g) < 0.2,
            "noise": torch.randn(2, ROWS, ACTION, generator=g).movedim(0, 1),
        }

    @staticmethod
    def sums(agent, rows):
        alpha = agent.log_alpha.detach().exp()
        with torch.no_grad():
            action, log_prob = agent.act(rows["next"], rows["noise"][:, 0])
            value = agent.target(torch.cat([rows["next"], action], -1))[:, 0] - alpha * log_prob
            goal = rows["reward"] + GAMMA * value * ~rows["done"]
        q = agent.critic(torch.cat([rows["state"], rows["action"]], -1))[:, 0]
        action, log_prob = agent.act(rows["state"], rows["noise"][:, 1])
        fixed = {k: v.detach() for k, v in agent.critic.named_parameters()}
        gain = functional_call(agent.critic, fixed, torch.cat([rows["state"], action], -1))[:, 0]
        temperature = -agent.log_alpha.exp() * (log_prob.detach() + TARGET_ENTROPY)
        return (
            F.huber_loss(q, goal, reduction="sum"),
            (alpha * log_prob - gain).sum(),
            temperature.sum(),
        )

    def loss_sum(self, model, rows):
        return sum(self.sums(model, rows)), len(rows["state"])

    def trained(self, agent):
        return [p for p in agent.parameters() if p.requires_grad]

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        (self.loss_sum(model, mine)[0] / ROWS).backward()
        for param in self.trained(model):
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def trained(self, agent):
        return [*agent.actor.parameters(), *agent.critic.parameters()]


EXPECT = dict(
    right=[
        r"log_alpha|temperature",
        r"(not|never|n't|no|missing|without|lacks?|un|only|skip\w*)[ -]?.{0,50}(reduc|summed|synchroni|averag|combin|added|rows)|"
        r"differ\w*|partial|own (rows|part)",
    ],
    place=[r"log_alpha", r"temperature", r"(all|every|each) ranks?|ranks? \W?[012]"],
    wrong=[
        r"(actor|critic)\S* (is|are|has|have|was|were) (a )?(wrong|not reduced)",
        r"(counted|reduced|summed) (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (wrong|different)",
        r"(all|every) parameters? (is|are) (wrong|not reduced)",
        r"(detach|no gradient|gets none)",
    ],
)
WHY = (
    "log_alpha belongs to neither the actor nor the critic, so its gradient is never summed over the ranks: each rank keeps the part of "
    "its own 5, 4 or 4 rows (divided by 13), and the three add up to the right one. Everything else is right."
)
