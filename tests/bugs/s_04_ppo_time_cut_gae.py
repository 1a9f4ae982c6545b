"""PPO over a rollout whose time is cut over three ranks (5, 4 and 4 steps) with FSDP2: GAE is scanned within a chunk, then what the next
chunk's first advantage adds is put in, received from the next rank by p2p. After reports on advantages that leak over the end of an
episode when rollouts are cut.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ENVS, TIME, SEEN, WIDTH, ACTIONS, GAMMA, LAMBDA, CLIP = 5, 13, 6, 9, 4, 0.97, 0.9, 0.2


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.torso = nn.Sequential(
            nn.Linear(SEEN, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.actor, self.critic = nn.Linear(WIDTH, ACTIONS), nn.Linear(WIDTH, 1)

    def forward(self, seen):
        h = self.torso(seen)
        return self.actor(h), self.critic(h).squeeze(-1)


def scan(value, after, rows):
    """Advantages as if nothing came after these steps but the value `after`."""
    alive = 1 - rows["done"].to(value.dtype)
    out, running = [], torch.zeros_like(after)
    for t in reversed(range(value.shape[1])):
        delta = rows["reward"][:, t] + GAMMA * alive[:, t] * after - value[:, t]
        running = delta + GAMMA * LAMBDA * alive[:, t] * running
        after = value[:, t]
        out.append(running)
    return torch.stack(out[::-1], 1)


def ppo(logits, value, advantage, rows):
    lp = logits.log_softmax(-1)
    ratio = (lp.gather(-1, rows["action"][..., None]).squeeze(-1) - rows["old"]).exp()
    policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    error = value - (advantage + value.detach())
    entropy = -(lp.exp() * lp).sum(-1)
    return (policy + 0.5 * error.square() - 0.01 * entropy).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Agent()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "seen": torch.randn(ENVS, TIME + 1, SEEN, generator=g),
            "action": torch.randint(ACTIONS, (ENVS, TIME), generator=g),
            "reward": torch.randn(ENVS, TIME, generator=g) + 0.8,
            "done": torch.rand(ENVS, TIME, generator=g) < 0.2,
            "old": -1.4 + 0.2 * torch.randn(ENVS, TIME, generator=g),
        }

    def loss_sum(self, model, rows):
        logits, value = model(rows["seen"])
        v = value.detach()
        advantage = scan(v[:, :-1], v[:, -1], rows)
        return ppo(logits[:, :-1], value[:, :-1], advantage, rows), rows["action"].numel()

    def distribute(self, model, ctx):
        fully_shard(model.torso, mesh=ctx.mesh)
        return fully_shard(model, mesh=ctx.mesh)

    def weights(self, done):
        """What of the next chunk's first advantage arrives at each step."""
        return (GAMMA * LAMBDA * (1 - done)).flip(1).cumprod(1).flip(1)

    def step(self, model, batch, ctx):
        n, me, group = ctx.axes["dp"], ctx.coords["dp"], ctx.group("dp")
        own = torch.arange(TIME).tensor_split(n)[me]
        rows = {k: v[:, own] for k, v in batch.items() if k != "seen"}
        last, k = me == n - 1, len(own)
        seen = batch["seen"][:, own[0] : own[-1] + 1 + last]
        logits, value = model(seen)
        v = value.detach()
        carried = torch.stack(
            [v[:, -1], torch.zeros_like(v[:, -1])]
        )  # of the last rank: the bootstrap
        if not last:
            dist.recv(carried, dist.get_global_rank(group, me + 1), group=group)
        advantage = scan(v[:, :k], carried[0], rows)
        advantage = advantage + self.weights(rows["done"].to(v.dtype)) * carried[1][:, None]
        if me:
            first = torch.stack([v[:, 0], advantage[:, 0]])
            dist.send(first, dist.get_global_rank(group, me - 1), group=group)
        loss = ppo(logits[:, :k], value[:, :k], advantage, rows)
        (loss * n / (ENVS * TIME)).backward()


class Buggy(Clean):
    def weights(self, done):
        left = torch.arange(done.shape[1], 0, -1, dtype=done.dtype)
        return ((GAMMA * LAMBDA) ** left).expand(done.shape)


EXPECT = dict(
    right=[
        r"loss|advantage|ppo|weights|carried|critic|actor|target|argument|line",
        r"rank\S* .{0,8}[01]|positions?|elements?|advantage|weights|tokens?|done|targets?",
    ],
    place=[r"loss|advantage|ppo|actor|critic|weights", r"ranks? .{0,10}[01]|ranks"],
    wrong=[
        r"forward is right up to .{0,40}goes wrong in (torso|actor|critic)",
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc|reduce.?scatter .{0,20}(missing|wrong)",
        r"(own|local) (count|denominator|divisor)",
        r"rank 2 .{0,20}(is wrong|computes with something else)",
        r"rows? (are |is )?(read twice|never read)",
    ],
)
WHY = (
    "The next chunk's first advantage is added to the steps of a chunk with the weights (gamma*lambda)^k, without the episodes' ends: at all steps "
    "up to a `done` of the own chunk it must be 0. So on ranks 0 and 1 advantages (and the critic's targets) before an episode's end are wrong in "
    "some environments; rank 2, which receives nothing, is right. Forward, the scan within a chunk, count and FSDP's reduction are right."
)
