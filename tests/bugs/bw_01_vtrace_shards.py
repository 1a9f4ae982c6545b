"""IMPALA with V-trace on long rollouts that are cut along time over three ranks (10 steps: 4, 3 and 3). The recursion of the V-trace targets runs from the last rank to the first; each rank takes what it
needs from the one after it, computes its targets, and hands on. Two micro-batches of rollouts, gradients summed over the time axis.

The bug: the advantage of the policy gradient, rho (r + discount vs_{t+1} - V_t), wants the V-trace TARGET of the next step. The single process code appends `bootstrap_value` to vs[1:], right at the end
of a rollout, where target and value are the same; ported to shards, the value of the first step of the next shard is appended, although that step has a target of its own. After reports on ports of
vtrace.py (scalable_agent, torchbeast, RLlib: "vs_t_plus_1 at the boundary of a fragment").
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"time": 3}}}}
ROWS, STEPS, FEATURES, WIDTH, ACTIONS = 5, 10, 4, 9, 3
RHO, C, ENTROPY = 1.0, 0.9, 0.02


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.policy, self.baseline = nn.Linear(WIDTH, ACTIONS), nn.Linear(WIDTH, 1)

    def forward(self, observations):
        h = self.body(observations)
        return self.policy(h).log_softmax(-1), 2 * self.baseline(h).squeeze(-1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Agent()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "observations": torch.randn(ROWS, STEPS + 1, FEATURES, generator=g),
            "actions": torch.randint(ACTIONS, (ROWS, STEPS), generator=g),
            "behaviour": torch.rand(ROWS, STEPS, generator=g) * 0.5 + 0.2,
            "rewards": torch.randn(ROWS, STEPS, generator=g),
            "discounts": 0.95 * (torch.rand(ROWS, STEPS, generator=g) < 0.9).float(),
        }

    def targets(self, values, next_value, next_target, rho, rewards, discounts):
        """V-trace targets of these steps; next_*: of the step after the last one."""
        following = torch.cat([values[:, 1:], next_value[:, None]], 1)
        deltas = rho.clamp(max=RHO) * (rewards + discounts * following - values)
        ahead, out = next_target - next_value, []
        for t in reversed(range(values.shape[1])):
            ahead = deltas[:, t] + discounts[:, t] * C * rho[:, t].clamp(max=1.0) * ahead
            out.append(values[:, t] + ahead)
        return torch.stack(out[::-1], 1)

    def advantages(self, vs, values, next_value, next_target, rho, rewards, discounts):
        vs_next = torch.cat([vs[:, 1:], next_target[:, None]], 1)
        return rho.clamp(max=RHO) * (rewards + discounts * vs_next - values)

    def losses(self, log_probs, values, vs, advantages, actions):
        taken = log_probs.gather(-1, actions[..., None]).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return (-taken * advantages + 0.5 * (vs - values).square() - ENTROPY * entropy).sum()

    @staticmethod
    def ratio(log_probs, part):
        taken = log_probs.detach().gather(-1, part["actions"][..., None]).squeeze(-1)
        return taken.exp() / part["behaviour"]

    def loss_sum(self, model, rows):
        log_probs, values = model(rows["observations"])
        log_probs, last = log_probs[:, :-1], values[:, -1].detach()
        values = values[:, :-1]
        v, rho = values.detach(), self.ratio(log_probs, rows)
        data = rho, rows["rewards"], rows["discounts"]
        vs = Clean.targets(self, v, last, last, *data)
        adv = Clean.advantages(self, vs, v, last, last, *data)
        return self.losses(log_probs, values, vs, adv, rows["actions"]), len(v) * STEPS

    def shard_loss(self, model, part, lo, hi, ctx):
        group, last_rank = ctx.group("time"), ctx.rank == ctx.world_size - 1
        own = {k: x[:, lo:hi] for k, x in part.items()}
        log_probs, values = model(own["observations"])
        v, rho = values.detach(), self.ratio(log_probs, own)
        edge = v.new_empty(2, len(v))
        if last_rank:
            with torch.no_grad():
                edge[:] = model(part["observations"][:, -1])[1]
        else:
            dist.recv(edge, ctx.rank + 1, group=group)
        next_value, next_target = edge
        data = rho, own["rewards"], own["discounts"]
        vs = self.targets(v, next_value, next_target, *data)
        if ctx.rank > 0:
            dist.send(torch.stack([v[:, 0], vs[:, 0]]), ctx.rank - 1, group=group)
        adv = self.advantages(vs, v, next_value, next_target, *data)
        return self.losses(log_probs, values, vs, adv, own["actions"])

    def step(self, model, batch, ctx):
        own = torch.arange(STEPS).tensor_split(ctx.world_size)[ctx.rank]
        lo, hi = int(own[0]), int(own[-1]) + 1
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: x.tensor_split(2)[n] for k, x in batch.items()}
            (self.shard_loss(model, part, lo, hi, ctx) / (ROWS * STEPS)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("time"))


class Buggy(Clean):
    def advantages(self, vs, values, next_value, next_target, rho, rewards, discounts):
        bootstrap_value = next_value
        vs_next = torch.cat([vs[:, 1:], bootstrap_value[:, None]], 1)
        return rho.clamp(max=RHO) * (rewards + discounts * vs_next - values)


EXPECT = dict(
    right=[
        r"advantage|vs_next|vs_t_plus_1|policy.?gradient|next_target|next_value|bootstrap",
        (
            r"(value|next_value|V\b|baseline|bootstrap).{0,80}(instead of|in place of|rather than|not the|where|for the).{0,60}(target|vs\b|v.?trace|next_target)"
            r"|next_target.{0,60}(unused|not used|never|ignored|dropped|missing|without)|boundar|last (own )?step|next (shard|rank)|edge of|end of (its|the|each|own) (shard|part|piece)"
        ),
    ],
    place=[r"advantages", r"vs_next", r"next_value|next_target|bootstrap_value", r"\bedge\b"],
    wrong=[
        r"(gradient|parameter).{0,30}(not reduced|reduced twice|never reduced)|missing (all.?)?reduc",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"divisor|mean of means|wrong count|divided by",
        r"wrong (rank|peer|neighbour)|stale|recv.{0,30}(wrong|overwrit)|targets.{0,20}(are|is) wrong for (the )?(value|baseline)|detach",
    ],
)
WHY = (
    "In advantages the step after the shard's last one enters by its value V instead of its V-trace target vs. On the last rank both are the same (bootstrap), so its loss is right; on ranks 0 and 1 the "
    "advantage of the last own step (steps 3 and 6 of 10) is off by rho * discount * (vs - V) of the next shard's first step, in both micro-batches, and after the reduction policy and body are wrong on all "
    "ranks; targets and the baseline's loss are right. A right cause says that at the boundary of the shards the advantage takes the neighbour's value where its target is due. Fix: append next_target."
)
