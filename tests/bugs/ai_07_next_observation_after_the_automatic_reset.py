"""Double Q-learning on rollouts of vectorised environments: seven environments of five steps each over three ranks, one or two micro-batches of environments per rank; a dueling network, a frozen target network, Huber loss of Q(o, a)
against r + gamma * Q_target(o', argmax Q(o')), zero behind terminated steps, summed over steps and divided by all steps. Gradients are packed into one flat buffer and summed over the ranks.

The bug: the environments reset themselves when an episode ends, so obs[t + 1] is the first observation of the next episode there. The successor of a step cut by the time limit should be the final observation kept in the info, but the
learner takes obs[t + 1] everywhere. As in sail-sg/envpool issues 33 and 194, google-deepmind/mujoco_playground issue 305 and openai/gym issue 3177 (auto-reset loses the terminal observation).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ENVS, STEPS, SIZE, ACTIONS, GAMMA = 7, 5, 4, 3, 0.9
PARTS = [[(0, 2), (2, 3)], [(3, 4), (4, 5)], [(5, 7)]]
TERMINATED = [(0, 3), (2, 1), (3, 2), (5, 0), (6, 4)]
TRUNCATED = [(1, 2), (2, 3), (4, 4), (6, 1)]


class Dueling(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(SIZE, 10), nn.Tanh(), nn.Linear(10, 8), nn.Tanh())
        self.value, self.advantage = nn.Linear(8, 1), nn.Linear(8, ACTIONS)

    def forward(self, x):
        h = self.trunk(x)
        a = self.advantage(h)
        return self.value(h) + a - a.mean(-1, keepdim=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.target = Dueling(), Dueling().requires_grad_(False)

    def forward(self, rows, kept):
        q = self.online(rows["obs"][:, :-1]).gather(-1, rows["action"][..., None]).squeeze(-1)
        after = rows["obs"][:, 1:]
        if kept:
            after = torch.where(rows["truncated"][..., None], rows["final"], after)
        with torch.no_grad():
            best = self.online(after).argmax(-1, keepdim=True)
            future = self.target(after).gather(-1, best).squeeze(-1)
            future = future.masked_fill(rows["terminated"], 0.0)
            target = rows["reward"] + GAMMA * future
        return F.smooth_l1_loss(q, target, reduction="sum")


class Clean:
    kept = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ends = {}
        for name, places in (("terminated", TERMINATED), ("truncated", TRUNCATED)):
            ends[name] = torch.zeros(ENVS, STEPS, dtype=torch.bool)
            for env, step in places:
                ends[name][env, step] = True
        return {
            "obs": torch.randn(ENVS, STEPS + 1, SIZE, generator=g) * 1.5,
            "final": torch.randn(ENVS, STEPS, SIZE, generator=g) * 1.5,
            "action": torch.randint(ACTIONS, (ENVS, STEPS), generator=g),
            "reward": torch.randn(ENVS, STEPS, generator=g) * 0.3,
            **ends,
        }

    def loss_sum(self, model, rows):
        return model(rows, True), rows["reward"].numel()

    def step(self, model, batch, ctx):
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            (model(rows, self.kept) / (ENVS * STEPS)).backward()
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat, group=ctx.group("dp"))
        for g, part in zip(grads, flat.split([g.numel() for g in grads])):
            g.copy_(part.view_as(g))


class Buggy(Clean):
    kept = False


EXPECT = dict(
    right=[
        r"(?i)rows?\b|env(ironment)?s?\b|micro.?batch|transition|step",
        r"(?i)target|input|observation|obs\b|successor|next|forward|final|loss",
        r"(?i)wrong|other|differ\w*|foreign|reset|not (the )?(own|right|same)|truncat\w*"
        r"|missing|never (read|used)|unused",
    ],
    place=[
        r"(?i)target|observation|obs\b|final|truncat|successor|loss|rows? \[?(1|2|4|6)\b"
        r"|online"
    ],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|reduced (twice|again)|(summed"
        r"|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)goes wrong in the backward|backward of .{0,40} is wrong|adjoint",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)"
        r"|only the last micro.?batch",
        r"(?i)only (on )?rank [012]\b|rank [012] alone|rows? \[?(0|3|5)\b.{0,25}(is|are) wrong",
        r"(?i)flat(tened)? buffer .{0,30}(wrong|order)|copied back .{0,20}wrong",
        r"(?i)target network .{0,25}(trained|gets a gradient)",
    ],
)
WHY = (
    "Four steps end by the time limit: environment 1 at step 2 (rank 0, micro-batch 0), environment 2 at step 3 (rank 0, micro-batch 1), environment 4 at step 4 (rank 1, micro-batch 1), environment 6 at step 1 (rank 2). Their "
    "successor should be final[env, step], and is obs[env, step + 1], the first observation of the next episode; so the double-Q target (the argmax of the online and the value of the target network) of these four of 35 terms "
    "is another one. Steps that terminated have no future term and are right; environments 0, 3 and 5 are entirely right. Q(o, a), the input of the online network's differentiated pass, is right; the regression target is "
    "wrong, so the loss and the gradient entering Q at these four steps, and with them all parameters of `online` (the target network is frozen), the same on all ranks. Divisor, packing and the sum over the ranks are right. "
    "Fix: take the kept final observation where truncated."
)
