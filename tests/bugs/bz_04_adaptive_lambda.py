"""Reinforcement learning from verifiable rewards with a critic (VAPO): the policy and value heads sit on one trunk, the advantages come from generalised advantage estimation with a length-adaptive lambda,
1 - 1/(alpha * length), the clipped ratio and the squared value error are summed over the response tokens and divided by their global number. DDP on three ranks, two micro-batches each with no_sync;
every micro-batch is trimmed to its longest response.

The bug: the length is taken from the width of the trimmed micro-batch instead of from each response's mask. After the length-adaptive GAE of VAPO and the reports about lengths read from padded tensors in
verl/OpenRLHF-like trainers.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCABULARY, WIDTH, ALPHA, CLIP = 13, 8, 15, 6, 0.6, 0.2


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.trunk = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.policy = nn.Linear(WIDTH, VOCABULARY)
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, states):
        h, _ = self.trunk(self.embed(states))
        return self.policy(h).log_softmax(-1), self.value(h).squeeze(-1)


def estimate(rewards, values, mask, lam):
    """Advantages and returns; the reward comes with the last token of the response."""
    advantages = torch.zeros_like(values)
    following, carried = torch.zeros_like(rewards), torch.zeros_like(rewards)
    last = mask.cumsum(1) == mask.sum(1, keepdim=True)
    for t in reversed(range(mask.shape[1])):
        delta = rewards * last[:, t] + following - values[:, t]
        carried = (delta + lam * carried) * mask[:, t]
        following = values[:, t] * mask[:, t]
        advantages[:, t] = carried
    return advantages, advantages + values


def objective(model, rows, lam):
    mask = rows["mask"]
    advantages, returns = estimate(rows["rewards"], rows["old_values"], mask, lam)
    logp, values = model(rows["states"])
    logp = logp.gather(-1, rows["actions"][..., None]).squeeze(-1)
    ratio = (logp - rows["old_logp"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    policy = -torch.minimum(ratio * advantages, clipped * advantages)
    return ((policy + 0.5 * (values - returns) ** 2) * mask).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return ActorCritic()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "states": ids[:, :-1],
            "actions": ids[:, 1:],
            "mask": (torch.arange(LENGTH) < lengths).float(),
            "rewards": torch.randn(ROWS, generator=g),
            "old_values": torch.randn(ROWS, LENGTH, generator=g),
            "old_logp": -2.7 + 0.1 * torch.randn(ROWS, LENGTH, generator=g),
        }

    def loss_sum(self, model, rows):
        lam = 1 - 1 / (ALPHA * rows["mask"].sum(1)).clamp(min=1)
        return objective(model, rows, lam), rows["mask"].sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def adaptive_lambda(self, mask):
        return 1 - 1 / (ALPHA * mask.sum(1)).clamp(min=1)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        count = mine["mask"].sum()
        dist.all_reduce(count)
        for n in range(2):
            rows = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            width = int(rows["mask"].sum(1).max())
            rows = {k: v[:, :width] if v.dim() > 1 else v for k, v in rows.items()}
            with contextlib.nullcontext() if n == 1 else model.no_sync():
                loss = objective(model, rows, self.adaptive_lambda(rows["mask"]))
                (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    def adaptive_lambda(self, mask):
        response_length = mask.shape[1]
        return max(0.0, 1 - 1 / (ALPHA * response_length))


EXPECT = dict(
    right=[
        r"lambda|advantages?\b|returns\b|lengths?\b|width|padd(ed|ing)|trim|longest|depends? on.{0,60}(rows|micro.?batch|neighbou?r|batch)|(together with|company of|other) (the )?(other )?rows"
    ],
    place=[
        r"adaptive_lambda",
        r"estimate|objective|advantages|returns",
        r"micro.?batch|rows?",
        r"mask",
    ],
    wrong=[
        r"(not|never) reduced|missing (all.?)?reduc|reduced (twice|again)|no_sync",
        r"divisor|denominator|mean of means|wrong (token )?count|own count|counted",
        r"micro.?batch.{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"random|dropout|detached|without graph",
    ],
)
WHY = (
    "lambda is 1 - 1/(0.6 length) with each response's own length. adaptive_lambda reads mask.shape[1], the width to which the micro-batch was trimmed, so that all responses of a micro-batch get the lambda of its "
    "longest; the longest itself is right, all shorter ones have wrong advantages and returns, on every rank whose micro-batch has responses of unlike length. The number of tokens, the exchange and the accumulation "
    "are right. A right cause says that the loss of a row depends on the width/padding of its micro-batch (or that the lengths, lambda, advantages are wrong). Fix: mask.sum(1)."
)
