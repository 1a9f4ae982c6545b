"""PPO whose rollout is cut along time over three ranks: each rank computes its piece of the generalised advantages and corrects it by what
the later rank hands over (a distributed scan). After reports on wrong episode ends at the cut of a rollout: the correction goes through
the ends of episodes inside the own piece.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"time": 3}}}}
ENVS, STEPS, INPUTS, ACTIONS = 5, 13, 6, 4
GAMMA, LAMBDA = 0.98, 0.95


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(INPUTS, 12), nn.Tanh(), nn.Linear(12, 10), nn.Tanh())
        self.policy, self.value = nn.Linear(10, ACTIONS), nn.Linear(10, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.policy(h).log_softmax(-1), self.value(h)[..., 0]


def scan(delta, alive):
    """advantage[t] = delta[t] + gamma lambda alive[t] advantage[t + 1], from zero."""
    out, carry = [], torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        carry = delta[:, t] + GAMMA * LAMBDA * alive[:, t] * carry
        out.append(carry)
    return torch.stack(out[::-1], 1)


def ppo(logp, value, advantage, rows):
    """All steps of all environments; the advantages are constants."""
    returns = advantage + value.detach()
    own = logp.gather(-1, rows["action"][..., None])[..., 0]
    ratio = (own - rows["old"]).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    entropy = -(logp.exp() * logp).sum(-1)
    return (0.5 * (value - returns).square() - gain - 0.01 * entropy).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Agent()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ENVS, STEPS + 1, INPUTS, generator=g),
            "action": torch.randint(ACTIONS, (ENVS, STEPS), generator=g),
            "old": torch.randn(ENVS, STEPS, generator=g) * 0.2 - 1.4,
            "reward": torch.randn(ENVS, STEPS, generator=g) + 0.5,
            "alive": (torch.rand(ENVS, STEPS, generator=g) > 0.2).float(),
        }

    def loss_sum(self, model, rows):
        logp, value = model(rows["x"][:, :-1])
        with torch.no_grad():
            after = torch.cat([value[:, 1:], model(rows["x"][:, -1:])[1]], 1)
            delta = rows["reward"] + GAMMA * rows["alive"] * after - value
            advantage = scan(delta, rows["alive"])
        return ppo(logp, value, advantage, rows), rows["action"].numel()

    def weights(self, alive):
        """How much of the later rank's first advantage reaches each own step."""
        return (GAMMA * LAMBDA * alive).flip(1).cumprod(1).flip(1)

    def step(self, model, batch, ctx):
        n, me, group = ctx.axes["time"], ctx.coords["time"], ctx.group("time")
        at = torch.arange(STEPS).tensor_split(n)[me]
        x = batch["x"]
        rows = {k: batch[k][:, at] for k in ("action", "old", "reward", "alive")}
        logp, value = model(x[:, at])
        with torch.no_grad():
            bootstrap = model(x[:, at[-1] + 1])[1]
            after = torch.cat([value[:, 1:], bootstrap[:, None]], 1)
            delta = rows["reward"] + GAMMA * rows["alive"] * after - value
            advantage = scan(delta, rows["alive"])
            if me < n - 1:
                carry = torch.empty_like(advantage[:, 0])
                dist.recv(carry, group=group, group_src=me + 1)
                advantage = advantage + self.weights(rows["alive"]) * carry[:, None]
            if me > 0:
                dist.send(advantage[:, 0].contiguous(), group=group, group_dst=me - 1)
        (ppo(logp, value, advantage, rows) / batch["action"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def weights(self, alive):
        left = torch.arange(alive.shape[1], 0, -1, device=alive.device)
        return ((GAMMA * LAMBDA) ** left).expand_as(alive).to(alive.dtype)


EXPECT = dict(
    right=[r"loss|gradient that reaches|target|advantage|goes into", r"policy|value|loss"],
    place=[r"policy|value|loss|advantage|rank[s]? .{0,12}[01]"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"forward .{0,30}goes wrong in",
        r"own (count|denominator|divisor)",
        r"on rank 2\b(?!.{0,40}right)",
        r"backward of (the )?trunk\S* (is )?wrong",
    ],
)
WHY = (
    "The correction by the later rank's first advantage is weighed by powers of gamma lambda alone, without the ends of episodes in the own "
    "piece, so on ranks 0 and 1 the advantages of the steps up to an end of an episode contain rewards of the next episode; rank 2 is the "
    "last piece and right. Log probabilities and values are right, the gradients that the loss gives `policy` and `value` are wrong there."
)
