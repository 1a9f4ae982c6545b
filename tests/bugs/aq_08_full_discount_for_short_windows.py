"""Double DQN with n-step returns (n = 3), a frozen target network and importance weights from a prioritised buffer, DDP on two ranks, three micro-batches each (no_sync for all but the last). A transition knows how many steps its window
really has: windows at the end of a fragment are shorter (they bootstrap earlier), windows that end with the episode do not bootstrap. Huber loss, weighted, mean over the transitions of both ranks.

The bug: the value of the state behind the window is discounted by gamma ** n for all, also for windows of one or two steps. As in ray-project/ray issue 4626 (wrong target discount in DQN in case of truncated n_step).
"""

import contextlib
import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
SEEN, ACTIONS, STEPS, GAMMA = 5, 3, 3, 0.7
WINDOW = [3, 3, 2, 3, 3, 1, 3, 3, 3, 3, 2, 1, 3]
ENDED = [0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0]
PARTS = [[(0, 2), (2, 4), (4, 7)], [(7, 9), (9, 11), (11, 13)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(SEEN, 8), nn.Tanh(), nn.Linear(8, ACTIONS))
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.requires_grad_(False).add_(torch.randn_like(p) * 0.3)

    def forward(self, seen, behind):
        values = self.online(seen)
        with torch.no_grad():
            best = self.online(behind).argmax(-1, keepdim=True)
            value = self.target(behind).gather(-1, best)[:, 0]
        return values, value


def td_loss(model, rows, full):
    values, behind = model(rows["seen"], rows["behind"])
    taken = values.gather(-1, rows["action"][:, None])[:, 0]
    powers = GAMMA ** torch.arange(STEPS).to(taken.dtype)
    inside = torch.arange(STEPS)[None] < rows["window"][:, None]
    steps = torch.full_like(rows["window"], STEPS) if full else rows["window"]
    target = (rows["reward"] * inside * powers).sum(-1)
    target = target + GAMMA ** steps.to(taken.dtype) * behind * (1 - rows["ended"])
    return (rows["weight"] * F.smooth_l1_loss(taken, target, reduction="none")).sum()


class Clean:
    full = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(WINDOW)
        return {
            "seen": torch.randn(rows, SEEN, generator=g),
            "behind": torch.randn(rows, SEEN, generator=g) * 2,
            "action": torch.randint(ACTIONS, (rows,), generator=g),
            "reward": torch.randn(rows, STEPS, generator=g) * 0.5,
            "weight": torch.rand(rows, generator=g) + 0.3,
            "window": torch.tensor(WINDOW),
            "ended": torch.tensor(ENDED),
        }

    def loss_sum(self, model, rows):
        return td_loss(model, rows, False), len(rows["action"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = td_loss(model, rows, self.full)
                (loss * ctx.world_size / len(batch["action"])).backward()


class Buggy(Clean):
    full = True


EXPECT = dict(
    right=[
        r"(?i)loss|target|discount|weight|labels?|gradient (of|at|that)",
        r"(?i)rows?|transitions?|micro.?batch|windows?|samples?",
        r"(?i)wrong|other|differ|discount|scal|target|not the",
    ],
    place=[r"(?i)loss|target|discount|online\.2|output"],
    wrong=[
        r"(?i)(not|never) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync.{0,30}(wrong|late|early)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)(online|forward|output)[^.;]{0,30} forward (is|goes) wrong|forward goes wrong (in|at) online|wrong input",
        r"(?i)own backward|backward of .{0,30}wrong",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never)",
        r"(?i)only (on )?rank [01]\b|rank [01] alone|all rows (are )?wrong|every row",
    ],
)
WHY = (
    "The forward of the online network is right in all rows; the target of the loss is wrong where the window is shorter than three steps and the episode has not ended: row 2 (rank 0, micro-batch 1, two steps: gamma^3 for gamma^2), row "
    "5 (rank 0, micro-batch 2, one step), row 11 (rank 1, micro-batch 2, one step). Row 10 is short too but ended: no bootstrap, right. All other rows are right. So the gradient of the loss with respect to the action values is wrong in "
    "these three rows (as far as the Huber loss is in its quadratic part there), and through them all gradients of online, equally on both ranks after DDP's average. Weights, rewards, divisor 13, no_sync and reduction are right. Fix: "
    "gamma ** (real number of steps)."
)
