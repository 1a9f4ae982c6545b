"""Q-learning with one replay memory: rank 0 holds the transitions and hands the other two ranks theirs by send and recv, field by field, before every micro-batch (4 + 2, 3 + 2 and 1 + 3 transitions). The target is the reward plus the
discounted best value of the next observation, where the episode goes on. DDP with no_sync, divisor is the number of all transitions.

The bug: the flag `ended` crosses the wire as uint8 and stays uint8 on the ranks that receive it. There ~ is the bitwise not, 0 becomes 255 and 1 becomes 254, both not zero, so that the episodes that ended are bootstrapped, too.
Rank 0 has its own rows as bool. After pytorch/pytorch issue 24180 (~ on byte tensors gives 254 and 255) and ZikangZhou/HiVT issue 44.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
SEEN, MOVES, ROWS, GAMMA = 5, 3, 15, 0.9
PARTS = [[(0, 4), (4, 6)], [(6, 9), (9, 11)], [(11, 12), (12, 15)]]
ENDED = [0, 1, 0, 0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(SEEN, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh())
        self.value, self.gain = nn.Linear(7, 1), nn.Linear(7, MOVES)

    def forward(self, seen):
        x = self.trunk(seen)
        gain = self.gain(x)
        return self.value(x) + gain - gain.mean(1, keepdim=True)


def td_loss(net, frozen, rows):
    """Sum of the squared errors; `frozen` is called without a graph."""
    with torch.no_grad():
        best = frozen(rows["next"]).max(1).values
    target = rows["reward"].clone()
    going = (~rows["ended"]).nonzero().squeeze(1)
    target[going] += GAMMA * best[going]
    taken = net(rows["seen"]).gather(1, rows["move"][:, None]).squeeze(1)
    return F.mse_loss(taken, target, reduction="sum")


class Replay:
    """The memory on the first rank; the others ask it for rows."""

    def __init__(self, ctx, as_flags):
        self.group, self.rank, self.as_flags = ctx.group("dp"), ctx.rank, as_flags

    def hand_out(self, batch, parts):
        if self.rank == 0:
            for rank in range(1, len(parts)):
                for low, high in parts[rank]:
                    for field in batch.values():
                        part = field[low:high]
                        wire = part.to(torch.uint8) if part.dtype == torch.bool else part
                        dist.send(wire.contiguous(), rank, group=self.group)
            return [{k: v[low:high] for k, v in batch.items()} for low, high in parts[0]]
        received = []
        for low, high in parts[self.rank]:
            rows = {}
            for name, field in batch.items():
                flag = field.dtype == torch.bool
                wire = torch.empty_like(field[low:high], dtype=torch.uint8 if flag else None)
                dist.recv(wire, 0, group=self.group)
                rows[name] = wire.bool() if flag and self.as_flags else wire
            received.append(rows)
        return received


class Clean:
    as_flags = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "seen": torch.randn(ROWS, SEEN, generator=g),
            "move": torch.randint(MOVES, (ROWS,), generator=g),
            "reward": torch.randn(ROWS, generator=g),
            "next": torch.randn(ROWS, SEEN, generator=g),
            "ended": torch.tensor(ENDED, dtype=torch.bool),
        }

    def loss_sum(self, model, rows):
        return td_loss(model, model, rows), len(rows["move"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        turns = Replay(ctx, self.as_flags).hand_out(batch, PARTS)
        for turn, rows in enumerate(turns):
            with contextlib.nullcontext() if turn == len(turns) - 1 else model.no_sync():
                loss = td_loss(model, model.module, rows)
                (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    as_flags = False


EXPECT = dict(
    right=[
        r"(?i)ended|done|terminal|flag|nonzero|going|target|bootstrap|~|bitwise_not|uint8|byte",
        r"(?i)ranks? (1|2)|1 and 2|1-2|receiv|recv|right on rank 0|not (on )?rank 0|(but|except) rank 0",
        r"(?i)uint8|byte|bool|dtype|bitwise|nonzero|index|mask|target|argument|another|other",
    ],
    place=[
        r"(?i)ended|nonzero|going|td_loss|target|mse_loss|mse|recv|hand_out|bitwise_not|invert|~"
    ],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|no_sync.{0,40}(wrong|missing)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)(wrong|goes wrong) on rank 0|only (on )?rank [12]\b",
        r"(?i)(rewards?|moves?|actions?) .{0,20}(is|are) (wrong|of other)|wrong rows|other rows are read",
        r"(?i)(trunk|gain|value)('s)? forward (is|goes) wrong|backward of (trunk|gain|value) is wrong",
    ],
)
WHY = (
    "On ranks 1 and 2 (both micro-batches) rows['ended'] is the uint8 tensor that recv filled; in td_loss `(~rows['ended']).nonzero()` is then bitwise: 0 -> 255, 1 -> 254, all not zero, so every row gets GAMMA * best added to its "
    "target. Wrong are the targets of the transitions that ended on ranks 1 and 2: rows 6, 9 (rank 1, micro-batches 0 and 1) and 11, 13 (rank 2, micro-batches 0 and 1); the target is too large or small by 0.9 * best. Rank 0 (rows 1 "
    "and 5 ended) keeps bool and is right. The outputs of the net are right everywhere; the gradient that comes from mse_loss at these rows is wrong. Divisor 15, "
    "DDP, no_sync and everything else that was sent are right. Fix: wire.bool() on receipt (or logical_not)."
)
