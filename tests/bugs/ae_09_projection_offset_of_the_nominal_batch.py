"""Distributional Q-learning (C51) on two pools: three learner ranks with 6, 4 and 3 transitions (whatever the replay shards gave) and two target ranks that hold the frozen target network. A target rank computes, for the transitions of the
learners that it serves, the projected target distribution and sends it; the learner takes the cross entropy and the learners sum their gradients.

The bug: the projection adds into a flattened (rows x atoms) tensor with `index_add_`, at row offsets made as in the well-known Rainbow code: linspace(0, (batch_size - 1) * atoms, batch_size). Here the number of offsets follows the rows that came,
and the end still follows the nominal batch size of 3, so for 4 and 6 rows the offsets are too close: rows add into each other's distributions. After Rainbow implementations (Curt-Park/rainbow-is-all-you-need, `_compute_dqn_loss`) used with
other batches than the nominal one; the same kind of offset with the wrong size is violet-zct/pytorch_NMT #10.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"learner": {"axes": {"dp": 3}}, "target": {"axes": {"dp": 2}}}}
STATE, ACTIONS, ATOMS, LOW, HIGH, GAMMA, NOMINAL = 5, 3, 6, -2.0, 3.0, 0.9, 3
SHARES = [(0, 6), (6, 10), (10, 13)]


def network():
    return nn.Sequential(
        nn.Linear(STATE, 12),
        nn.Tanh(),
        nn.Linear(12, 10),
        nn.Tanh(),
        nn.Linear(10, ACTIONS * ATOMS),
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.target = network(), network().requires_grad_(False)


def log_distribution(net, state):
    return net(state).view(-1, ACTIONS, ATOMS).log_softmax(-1)


@torch.no_grad()
def projected(target, rows, batch_size):
    """Target distribution of each row on the atoms; `batch_size` is only used for the row offsets."""
    n = len(rows["reward"])
    following = log_distribution(target, rows["next"]).exp()
    support = torch.linspace(LOW, HIGH, ATOMS, dtype=following.dtype)
    best = (following * support).sum(-1).argmax(-1)
    following = following[torch.arange(n), best]
    value = rows["reward"].to(support.dtype)[:, None] + GAMMA * (~rows["done"])[:, None] * support
    at = (value.clamp(LOW, HIGH) - LOW) / ((HIGH - LOW) / (ATOMS - 1))
    lower, upper = at.floor().long(), at.ceil().long()
    lower[(upper > 0) & (lower == upper)] -= 1
    upper[(lower < ATOMS - 1) & (lower == upper)] += 1
    offset = torch.linspace(0, (batch_size - 1) * ATOMS, n).long()[:, None]
    out = torch.zeros_like(following)
    out.view(-1).index_add_(0, (lower + offset).view(-1), (following * (upper - at)).view(-1))
    out.view(-1).index_add_(0, (upper + offset).view(-1), (following * (at - lower)).view(-1))
    return out


def cross_entropy(online, rows, wanted):
    logp = log_distribution(online, rows["state"])[torch.arange(len(wanted)), rows["action"]]
    return -(wanted * logp).sum()


class Clean:
    nominal_offset = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = SHARES[-1][1]
        return {
            "state": torch.randn(rows, STATE, generator=g),
            "action": torch.randint(ACTIONS, (rows,), generator=g),
            "reward": 1.2 * torch.randn(rows, generator=g),
            "next": torch.randn(rows, STATE, generator=g),
            "done": torch.rand(rows, generator=g) < 0.25,
        }

    def loss_sum(self, model, rows):
        n = len(rows["reward"])
        return cross_entropy(model.online, rows, projected(model.target, rows, n)), n

    def distribute(self, model, ctx):
        if ctx.pool == "learner":
            del model.target
        else:
            del model.online
        return model

    def step(self, model, batch, ctx):
        servers = ctx.pools["target"]
        if ctx.pool == "target":
            for i, learner in enumerate(ctx.pools["learner"]):
                if servers[i % len(servers)] == ctx.rank:
                    rows = {k: v[slice(*SHARES[i])] for k, v in batch.items()}
                    size = NOMINAL if self.nominal_offset else len(rows["reward"])
                    dist.send(projected(model.target, rows, size), learner)
            return
        i = ctx.coords["dp"]
        rows = {k: v[slice(*SHARES[i])] for k, v in batch.items()}
        wanted = torch.empty(len(rows["reward"]), ATOMS, dtype=next(model.parameters()).dtype)
        dist.recv(wanted, servers[i % len(servers)])
        (cross_entropy(model.online, rows, wanted) / len(batch["reward"])).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    nominal_offset = True


EXPECT = dict(
    right=[
        r"(?i)target|wanted|projection|loss|label|rows?",
        r"(?i)wrong|other|foreign|mix|misplaced|differ|off|shift|not (the )?(same|right)|unlike|zero",
        r"(?i)rows?|rank 0|rank 1|ranks 0|ranks 1|learner",
    ],
    place=[r"(?i)target|wanted|projection|loss|rows?|learner|received|message"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|missing (reduction|all.?reduce)",
        r"(?i)mean of means|divi(ded|des) by (its|their) own (row|count|batch)|factor of (1/)?[0-9]",
        r"(?i)online\.[0-9].{0,30}(forward|output|activation).{0,15}wrong|forward of (the )?online.{0,20}wrong",
        r"(?i)rank 2.{0,40}(is|are|has) wrong|all (three )?learners? (is|are) wrong|every row is wrong",
        r"(?i)target network.{0,20}(stale|moved|has moved|trained)|states? (is|are) of other rows|actions? (is|are) wrong",
        r"(?i)micro.?batch.{0,20}(lost|dropped|overwritten)",
    ],
)
WHY = (
    "The target distributions for learner 0 (6 rows; computed on rank 3) and learner 1 (4 rows; on rank 4) are added at the offsets 0, 2, 4, 7, 9, 12 and 0, 4, 8, 12 instead of 0, 6, 12, 18(, 24, 30): the first rows get mass of later ones, the last rows get "
    "little or none, so the rows' targets no longer sum to one. Learner 2 (3 rows, the nominal size) is right. The online network's forward is right on all learners; what it is compared with is wrong, so the gradient of the loss with respect to the "
    "log-probabilities is wrong in rows 0 to 9, and after the sum all online.* gradients are wrong on all learner ranks, in direction. Divisor 13 and reduction are right. Fix: torch.arange(n) * atoms, or the actual batch size in the offset."
)
