"""Quantile regression Q-learning (QR-DQN) with a frozen target network under DDP on two ranks with two micro-batches each (no_sync for the first): five quantiles from each network, all pairs of them compared with the asymmetric Huber
loss. Pairs of an episode's last step weigh like others; the divisor is the number of transitions of both ranks.

The bug: for replay rows marked as demonstrations the weights |tau - 1(u < 0)| come from a helper that lays the levels along the axis of the target quantiles and not of the online ones. As the axis questions at BY571/IQN-and-Extensions
issue 5 and archsyscall/DistRL-TensorFlow2 issue 1 (which runs only if both sizes agree).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
STATE, ACTIONS, ATOMS, GAMMA = 5, 3, 5, 0.9
PARTS = [[(0, 3), (3, 5)], [(5, 9), (9, 11)]]
DEMONSTRATION = [0, 1, 0, 0, 0, 1, 0, 1, 0, 1, 0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(STATE, 8), nn.SiLU(), nn.Linear(8, ACTIONS * ATOMS))
        self.target = nn.Sequential(
            nn.Linear(STATE, 6), nn.SiLU(), nn.Linear(6, ACTIONS * ATOMS)
        ).requires_grad_(False)

    def forward(self, state, following):
        now = self.online(state).unflatten(1, (ACTIONS, ATOMS))
        return now, self.target(following).unflatten(1, (ACTIONS, ATOMS))


def quantile_loss(model, rows, transposed):
    """The sum over transitions of the pairwise quantile Huber loss: online i, target j."""
    now, then = model(rows["state"], rows["following"])
    each = torch.arange(len(now))
    now = now[each, rows["action"]]
    then = then[each, then.mean(2).argmax(1)]
    goal = rows["reward"][:, None] + GAMMA * (1 - rows["done"])[:, None] * then
    u = goal[:, None, :] - now[:, :, None]
    huber = F.smooth_l1_loss(
        now[:, :, None].expand_as(u), goal[:, None, :].expand_as(u), reduction="none"
    )
    levels = (torch.arange(ATOMS, device=u.device, dtype=u.dtype) + 0.5) / ATOMS
    below = (u < 0).to(u.dtype)
    weight = (levels[None, :, None] - below).abs()
    if transposed:
        other = (levels[None, None, :] - below).abs()
        weight = torch.where(rows["demonstration"][:, None, None] > 0, other, weight)
    return (weight * huber).sum(1).mean(1).sum()


class Clean:
    transposed = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        n = len(DEMONSTRATION)
        return {
            "state": torch.randn(n, STATE, generator=g),
            "following": torch.randn(n, STATE, generator=g),
            "action": torch.randint(ACTIONS, (n,), generator=g),
            "reward": torch.randn(n, generator=g),
            "done": (torch.arange(n) % 4 == 3).float(),
            "demonstration": torch.tensor(DEMONSTRATION),
        }

    def loss_sum(self, model, rows):
        return quantile_loss(model, rows, False), len(rows["action"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = quantile_loss(model, rows, self.transposed)
                (loss * ctx.world_size / len(batch["action"])).backward()


class Buggy(Clean):
    transposed = True


EXPECT = dict(
    right=[
        r"(?i)loss|weight(s|ed|ing)?\b|derivative",
        r"(?i)rows?|transition|sample|demonstration",
        r"(?i)loss|derivative|output|weigh|objective",
    ],
    place=[r"(?i)loss|online(\.2)?|output"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted twice|"
        r"no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)forward of .{0,20}(online|target).{0,20}wrong|(online|"
        r"target)\S* computes something else",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)only (the )?(first|last|second) micro.?batch",
        r"(?i)all (eleven )?rows (are )?wrong|every row",
    ],
)
WHY = (
    "The networks' outputs are right. In the loss, rows marked as demonstrations (rows 1, 5, 7 and 9: rank 0 micro-batch 0 row 1; rank 1 micro-batch 0 rows 5 and 7, micro-batch 1 row 9; rank 0's second micro-batch, rows 3 and 4, "
    "has none) take the weights |tau_j - 1(u_ij < 0)| with the level tau of the target quantile j instead of |tau_i - 1(u_ij < 0)| of the online quantile i. The derivative of the loss by the online quantiles of these rows is wrong "
    "in direction, so all online parameters are wrong, equally on both ranks after DDP's average; the target network has no gradients. Other rows, divisor 11, no_sync and reduction are right. Fix: levels[None, :, None] for all "
    "rows."
)
