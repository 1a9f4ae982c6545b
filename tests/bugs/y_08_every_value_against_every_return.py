"""PPO with the actor and the critic in pools of their own (two and three ranks), each with its own data-parallel cut and micro-batches. The critic's ranks first compute the values without gradient and send them to the actors, which take advantage = return - value;
then both pools train, the sums of the losses divided by all 13 transitions.

The bug: the value head gives [B, 1], the returns are [B], and `values - returns` is [B, B]: every value is drawn to every return of its micro-batch. The mean over the square hides it. RLinf/RLinf issue #1568 (OpenPI PPO critic: values against returns broadcast to [B, B]),
LAMDA-Tabular/TALENT PR #92, pytorch/pytorch issues #16045 and #19699.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"actor": {"axes": {"dp": 2}}, "critic": {"axes": {"dp": 3}}}}
ROWS, STATE, ACTION, WIDTH, CLIP, MICRO = 13, 6, 2, 9, 0.2, 3


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(STATE, WIDTH), nn.Tanh(), nn.Linear(WIDTH, ACTION))
        self.log_std = nn.Parameter(torch.full((ACTION,), -0.3))

    def forward(self, state, action):
        z = (action - self.body(state)) / self.log_std.exp()
        return (-0.5 * z.square() - self.log_std).sum(-1)


def policy_loss(actor, rows, value):
    advantage = rows["returns"] - value
    ratio = (actor(rows["state"], rows["action"]) - rows["old_log_prob"]).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).sum()


def critic_loss(values, returns):
    """Half the squared error, summed over the rows."""
    return 0.5 * (values - returns).square().mean() * len(returns)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        critic = nn.Sequential(
            nn.Linear(STATE, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, 1),
        )
        return nn.ModuleDict({"actor": Actor(), "critic": critic})

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "state": torch.randn(ROWS, STATE, generator=g),
            "action": torch.randn(ROWS, ACTION, generator=g),
            "old_log_prob": -1.5 + 0.8 * torch.randn(ROWS, generator=g),
            "returns": 1.5 * torch.randn(ROWS, generator=g),
        }

    def terms(self):
        return {
            "policy": lambda model, rows: (
                policy_loss(
                    model["actor"], rows, model["critic"](rows["state"]).squeeze(-1).detach()
                ),
                len(rows["state"]),
            ),
            "value": lambda model, rows: (
                critic_loss(model["critic"](rows["state"]).squeeze(-1), rows["returns"]),
                len(rows["state"]),
            ),
        }

    def loss_sum(self, model, rows):
        value = model["critic"](rows["state"]).squeeze(-1)
        return policy_loss(model["actor"], rows, value.detach()) + critic_loss(
            value, rows["returns"]
        ), len(rows["state"])

    def distribute(self, model, ctx):
        del model["critic" if ctx.pool == "actor" else "actor"]
        return model

    def value_of(self, critic, state):
        return critic(state).squeeze(-1)

    def send_values(self, model, batch, ctx):
        value = torch.zeros_like(batch["returns"])
        for part, source, state in zip(
            value.tensor_split(3), ctx.pools["critic"], batch["state"].tensor_split(3)
        ):
            if ctx.rank == source:
                with torch.no_grad():
                    part.copy_(model["critic"](state).squeeze(-1))
            dist.broadcast(part, src=source)
        return value

    def step(self, model, batch, ctx):
        data = batch | {"value": self.send_values(model, batch, ctx)}
        mine = {k: v.tensor_split(ctx.pool_size)[ctx.pool_rank] for k, v in data.items()}
        for first in range(0, len(mine["state"]), MICRO):
            rows = {k: v[first : first + MICRO] for k, v in mine.items()}
            if ctx.pool == "actor":
                loss = policy_loss(model["actor"], rows, rows["value"])
            else:
                loss = critic_loss(self.value_of(model["critic"], rows["state"]), rows["returns"])
            (loss / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def value_of(self, critic, state):
        return critic(state)


EXPECT = dict(
    right=[
        r"critic|value",
        r"broadcast|shape|\[B, ?B\]|couple|return|target|rows?|micro.?batch|each other|pair|mean of|not additive|loss|term",
        r"broadcast|shape|micro.?batch|other rows|each other|couple|pair|all rows|every|foreign|mean|return|target|rows? \d|loss (is|differs)|other (function|loss)|differ|wrong",
    ],
    place=[r"critic|value|return"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"(reduced|summed|added) (twice|again)",
        r"each rank .{0,20}own (count|number|denominator)",
        r"micro.?batch\S* .{0,20}(lost|dropped|overwritten)",
        r"actor\S* .{0,30}(is|are) wrong|polic\S+ (term|loss) (is|goes) wrong",
        r"pure(ly)? (a )?(scale|factor)|by one (and the same )?factor",
        r"advantage\S* (is|are) wrong",
    ],
)
WHY = (
    "In the critic's pool (ranks 2-4) values of shape [B, 1] meet returns of shape [B]; the difference is [B, B], and its mean square times B gives every value the gradient (value - mean of the micro-batch's returns) in place of (value - own return). So all tensors of the critic are wrong, on its three ranks alike, "
    "the last layer's bias excepted, whose gradient is the sum over rows and comes out the same. Its micro-batches are 3+2, 3+1 and 3+1 rows; those of one row (row 8 and row 12) are right, all other rows are wrong. The division by 13, the sum over ranks, the values sent to the actors, the advantages and everything in the actor's pool are right. "
    "The fix is squeeze(-1), or an assertion that shapes agree."
)
