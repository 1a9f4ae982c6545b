"""A reward model (Bradley-Terry with a margin, centred rewards) whose sequences are cut over two ranks beside two data-parallel replicas.
After OpenRLHF's and verl's reports of reward and critic models under ring attention (the last token is on one rank only) and FAULTS
C19: each rank takes the last valid token of its own chunk.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"reward": {"axes": {"dp": 2, "cp": 2}}}}
PAIRS, LENGTH, VOCAB, WIDTH = 9, 10, 12, 8


class Everyone(torch.autograd.Function):
    """Keys or values of all chunks; the gradient is summed over the ranks that used them."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), dim=1)[dist.get_rank(ctx.group)], None


class Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 11), nn.GELU(), nn.Linear(11, WIDTH))

    def forward(self, tokens, where, everyone):
        x = self.embed(tokens) + self.position(where)
        y = self.norm1(x)
        scores = self.q(y) @ everyone(self.k(y)).mT / WIDTH**0.5
        later = torch.arange(scores.size(-1)) > where[:, None]
        x = x + scores.masked_fill(later, float("-inf")).softmax(-1) @ everyone(self.v(y))
        return x + self.mlp(self.norm2(x))


class RewardModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.score = Backbone(), nn.Linear(WIDTH, 1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return RewardModel()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "tokens": torch.randint(VOCAB, (PAIRS, 2, LENGTH), generator=g),
            "lengths": torch.randint(2, LENGTH + 1, (PAIRS, 2), generator=g),
            "margin": torch.rand(PAIRS, generator=g),
        }

    @staticmethod
    def pair_loss(rewards, margin):
        chosen, rejected = rewards.unflatten(0, (-1, 2)).unbind(1)
        centred = 0.1 * (chosen + rejected).square()
        return (centred - F.logsigmoid(chosen - rejected - margin)).sum()

    def last_token(self, hidden, where, lengths):
        """The hidden state of the last valid token, zero where another rank has it."""
        return (hidden * (where == lengths[:, None] - 1)[..., None]).sum(1)

    def loss_sum(self, model, rows):
        where, lengths = torch.arange(LENGTH), rows["lengths"].flatten()
        hidden = model.backbone(rows["tokens"].flatten(0, 1), where, lambda x: x)
        hidden = hidden[torch.arange(len(hidden)), lengths - 1]
        return self.pair_loss(model.score(hidden)[:, 0], rows["margin"]), len(rows["margin"])

    def step(self, model, batch, ctx):
        cp, size = ctx.group("cp"), ctx.axes["cp"]
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        where = torch.arange(LENGTH).chunk(size)[ctx.coords["cp"]]
        tokens, lengths = mine["tokens"].flatten(0, 1)[:, where], mine["lengths"].flatten()
        hidden = model.backbone(tokens, where, lambda x: Everyone.apply(x, cp))
        hidden = Total.apply(self.last_token(hidden, where, lengths), cp)
        loss = self.pair_loss(model.score(hidden)[:, 0], mine["margin"])
        (loss / PAIRS / size).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def last_token(self, hidden, where, lengths):
        valid = where < lengths[:, None]
        return hidden[torch.arange(len(hidden)), valid.sum(1) - 1]


EXPECT = dict(
    right=[
        r"score|head|reward|pool|last token|backbone",
        r"forward|output|activation|input of|values? (of|at|in|enter)|token|chunk|loss (is|differs|of|value)|position",
    ],
    place=[r"score", r"last", r"(all|every|each) ranks?|ranks? \W?[0-3]"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (right|exact|correct)$",
        r"(output|forward) of (the )?backbone\S* (is|was) wrong",
        r"detach|no_grad",
    ],
)
WHY = (
    "The pooled state is the sum of the last valid token of the first chunk and one of the second, instead of the last token of the "
    "sequence alone. The input of score is wrong on all ranks (the backbone's forward is right), and with it all gradients."
)
