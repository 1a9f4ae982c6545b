"""Actor-critic in the style of A3C on two ranks: for every rollout (micro-batch; three on rank 0, two on rank 1, of different lengths) a worker copy of the network takes the weights of the shared
one, does forward and backward, and hands its gradients to the
shared network, which adds them up; at the end the ranks' sums are added. Policy, value and entropy terms, the divisor is the number of steps of all rollouts.

The bug: the hand-over returns as soon as the shared parameter has a gradient (ensure_shared_grads of the original code, meant for one hand-over by reference): only the first rollout of each rank
gets through. As asked in ikostrikov/pytorch-a3c issues 20 and 25,
greydanus/baby-a3c issue 3, mimoralea/gdrl issue 25.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
SEEN, WIDTH, ACTIONS = 5, 7, 3
PARTS = [[(0, 3), (3, 5), (5, 9)], [(9, 11), (11, 16)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(SEEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.policy, self.value = nn.Linear(WIDTH, ACTIONS), nn.Linear(WIDTH, 1)

    def forward(self, seen):
        h = torch.tanh(self.norm(self.trunk(seen)))
        return self.policy(h).log_softmax(-1), self.value(h).squeeze(-1)


def actor_critic_loss(model, rows):
    logp, value = model(rows["seen"])
    chosen = logp.gather(1, rows["action"][:, None]).squeeze(1)
    entropy = -(logp.exp() * logp).sum(1)
    critic = F.mse_loss(value, rows["return"], reduction="none")
    return (0.5 * critic - chosen * rows["advantage"] - 0.02 * entropy).sum()


def hand_over(worker, shared, once):
    for mine, theirs in zip(worker.parameters(), shared.parameters()):
        if theirs.grad is None:
            theirs.grad = mine.grad
        elif once:
            return
        else:
            theirs.grad += mine.grad


class Clean:
    once = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        return {
            "seen": torch.randn(rows, SEEN, generator=g),
            "action": torch.randint(ACTIONS, (rows,), generator=g),
            "advantage": torch.randn(rows, generator=g),
            "return": torch.randn(rows, generator=g),
        }

    def loss_sum(self, model, rows):
        return actor_critic_loss(model, rows), len(rows["seen"])

    def step(self, model, batch, ctx):
        worker = Net().to(model.trunk.weight)
        worker.load_state_dict(model.state_dict())
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            worker.zero_grad(set_to_none=True)
            (actor_critic_loss(worker, rows) / len(batch["seen"])).backward()
            hand_over(worker, model, self.once)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    once = True


EXPECT = dict(
    right=[
        r"(?i)micro.?batch|rollout|rows? \d|rows\b|accumulat|contribution",
        r"(?i)lost|missing|dropped|only the first|first (micro.?batch|rollout|rows)"
        r"|never (read|added|counted|arriv)|left out|not (in|added|counted|accumulated"
        r"|arriv)"
        r"|coefficient 0|count(s|ed)? (0|zero|not)|do(es)? not (reach|arrive|count"
        r"|contribute)|absent",
    ],
    place=[r"(?i)micro.?batch|rollout|rows|accumulat|hand.?over|shared"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the (forward|backward)",
        r"(?i)only the last (micro.?batch|rollout)|first (micro.?batch"
        r"|rollout)\S* .{0,20}(is |are )?(lost|missing|dropped)",
        r"(?i)(never|not) (been )?all.?reduced|reduced twice|summed twice|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)only (on )?rank [01] (is|goes)\b|rank [01] alone",
        r"(?i)(value|policy|entropy) (term|loss) (is|was) (missing|dropped|lost)",
    ],
)
WHY = (
    "On each rank only the first rollout counts: rows 0-2 of rank 0 and rows 9-10 of rank 1. At the second and third hand-over the first parameter already has a gradient and the function returns, so "
    "rows 3-4 and 5-8 (rank 0) and 11-15 (rank 1) are missing from all parameters on "
    "both ranks, all three terms of the loss. The forward and backward of all rollouts are right in the worker, and so are the divisor 16 (all steps) and the all-reduce at the end. "
    "zero_grad(set_to_none=True) gives the worker new gradient tensors, so that "
    "the reference handed over keeps the first rollout's values. Fix: add the worker's gradient to the one that is there."
)
