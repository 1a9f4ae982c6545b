"""GSPO: one importance ratio per sequence, exp of the mean log ratio over its tokens, with the sequence cut over three ranks. After verl's
and ms-swift's GSPO under sequence and context parallelism (loss aggregation on the local part of a response) and FAULTS C04/C19: the
mean is that of the rank's own chunk.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"actor": {"axes": {"cp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH, CLIP = 8, 12, 9, 7, 0.2


class Everyone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


class Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.before, self.own = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, where, everyone=lambda x: x):
        x = self.embed(tokens)
        past = everyone(self.before(x)).cumsum(1)[:, where] / (where[:, None] + 1)
        return self.head(self.norm(x + torch.tanh(past + self.own(x)))).log_softmax(-1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Actor()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        first = torch.randint(1, 6, (ROWS, 1), generator=g)
        last = torch.randint(7, LENGTH + 1, (ROWS, 1), generator=g)
        where = torch.arange(LENGTH)
        return {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "mask": (where >= first) & (where < last),
            "old": 0.4 * torch.randn(ROWS, LENGTH, generator=g) - 2.3,
            "advantage": torch.randn(ROWS, generator=g),
        }

    @staticmethod
    def log_ratio(log_probs, rows):
        taken = log_probs.gather(-1, rows["labels"][..., None])[..., 0]
        return (taken - rows["old"]) * rows["mask"]

    @staticmethod
    def objective(mean_log_ratio, advantage):
        ratio = mean_log_ratio.exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)

    def loss_sum(self, model, rows):
        log_ratio = self.log_ratio(model(rows["tokens"], torch.arange(LENGTH)), rows)
        mean = log_ratio.sum(1) / rows["mask"].sum(1)
        return self.objective(mean, rows["advantage"]).sum(), len(mean)

    def mean_over_sequence(self, log_ratio, mask):
        length = mask.sum(1)
        dist.all_reduce(length)
        return Total.apply(log_ratio.sum(1)) / length

    def step(self, model, batch, ctx):
        where = torch.arange(LENGTH).chunk(ctx.world_size)[ctx.rank]
        mine = {k: v[:, where] for k, v in batch.items() if k != "advantage"}
        log_ratio = self.log_ratio(model(mine["tokens"], where, Everyone.apply), mine)
        mean = self.mean_over_sequence(log_ratio, mine["mask"])
        loss = self.objective(mean, batch["advantage"]).sum() / ROWS
        (loss / ctx.world_size).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def mean_over_sequence(self, log_ratio, mask):
        return log_ratio.sum(1) / mask.sum(1).clamp(min=1)


EXPECT = dict(
    right=[
        r"loss|gradient (at|of|into|entering) the (output|logits|head)|objective|ratio|head",
        r"own (chunk|shard|part|tokens|positions)|local|chunk|shard|token|position|per rank|rank'?s|sequence|weight|coefficient|"
        r"normali[sz]|not .{0,30}(constant|one number)|enter|backward",
    ],
    place=[
        r"loss",
        r"token|position|sequence|chunk|shard",
        r"(all|every|each) (rank|parameter)s?|ranks? \W?[012]",
    ],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"reduced (twice|again)",
        r"(output|forward) of (the )?(embed|before|own|norm|head)\S* (is|was) wrong|forward (pass )?(is|was) wrong",
        r"micro.?batch",
        r"no gradient|receives? (no|zero) gradient",
    ],
)
WHY = (
    "The ratio of a sequence is computed from the tokens of the rank's own chunk (mean over its own count, clipped on its own) "
    "instead of the mean over the whole response. The model's forward is right up to the log-probabilities; the loss and all "
    "gradients are wrong on all ranks."
)
