"""PPO with actor and critic on pools of different size: the critic's ranks hand the values of their rows over, and each actor rank takes
those of its own. Modelled on the dispatch reports of verl / OpenRLHF / NeMo-RL for roles with different data-parallel sizes (and
FAULTS C03-07, C16): the place of an actor's rows is computed with the critic's share.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"actor": {"axes": {"dp": 2}}, "critic": {"axes": {"dp": 3}}}}
ROWS, STATE, ACTIONS, CLIP = 12, 6, 4, 0.3


class Net(nn.Sequential):
    def __init__(self, outputs):
        super().__init__(nn.Linear(STATE, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, outputs))


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = Net(ACTIONS), Net(1)


def policy_loss(model, rows, values):
    log_prob = model.actor(rows["state"]).log_softmax(-1).gather(1, rows["action"][:, None])[:, 0]
    ratio, advantage = (log_prob - rows["old"]).exp(), rows["return"] - values
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).sum()


def value_loss(values, rows):
    return F.huber_loss(values, rows["return"], reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "policy": lambda m, r: (
                policy_loss(m, r, m.critic(r["state"])[:, 0].detach()),
                len(r["state"]),
            ),
            "value": lambda m, r: (value_loss(m.critic(r["state"])[:, 0], r), len(r["state"])),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return Agent()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "state": torch.randn(ROWS, STATE, generator=g),
            "action": torch.randint(ACTIONS, (ROWS,), generator=g),
            "old": -1.4 + 0.3 * torch.randn(ROWS, generator=g),
            "return": 1.5 * torch.randn(ROWS, generator=g),
        }

    def loss_sum(self, model, rows):
        values = model.critic(rows["state"])[:, 0]
        return policy_loss(model, rows, values.detach()) + value_loss(values, rows), len(
            rows["state"]
        )

    def distribute(self, model, ctx):
        delattr(model, "critic" if self.is_actor(ctx) else "actor")
        return model

    @staticmethod
    def is_actor(ctx):
        return getattr(ctx.pool, "name", ctx.pool) == "actor"

    def values_of(self, values, ctx, rows):
        """The own rows of the values of all critic ranks."""
        return values.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        values = torch.zeros(ROWS, dtype=ctx.dtype)
        if not self.is_actor(ctx):
            own = model.critic(mine["state"])[:, 0]
            values.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]].copy_(own.detach())
        dist.all_reduce(values)
        if self.is_actor(ctx):
            loss = policy_loss(model, mine, self.values_of(values, ctx, len(mine["state"])))
        else:
            loss = value_loss(own, mine)
        (loss / ROWS).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def values_of(self, values, ctx, rows):
        first = ctx.coords["dp"] * (ROWS // TOPOLOGY["pools"]["critic"]["axes"]["dp"])
        return values[first : first + rows]


EXPECT = dict(
    right=[
        r"actor|policy",
        r"rank \W?1\b|ranks? 1|second|rows|loss|output gradient|gradient (at|of|entering|into) (the )?output|advantage|values?|weight|"
        r"coefficient|factor",
        r"wrong|differ|other|mismatch|not the|shift|unequal|uneven|not proportional|per.?row",
    ],
    place=[r"actor|policy", r"rank \W?1\b"],
    wrong=[
        r"critic\S* (is|are|has|have) (a )?wrong",
        r"value (term|loss)\S* .{0,25}(is|was|has) (wrong|lost|scaled|missing|counted)",
        r"(never|not) (been )?(all.?)?(reduced|summed|averaged)",
        r"(reduced|counted|summed) (twice|again)",
        r"forward (pass )?(is|was) wrong",
        r"mean of (the )?(rank |ranks' )?means",
    ],
)
WHY = (
    "Actor rank 1 holds rows 6 to 11 but takes the values of rows 4 to 9 (its number times the critic's share of 4): its advantages are "
    "wrong. The policy term of the rows of rank 1 is wrong and with it all of actor.*, on both actor ranks after the sum; rank 0's "
    "rows, the critic, the value term and both forwards are right."
)
