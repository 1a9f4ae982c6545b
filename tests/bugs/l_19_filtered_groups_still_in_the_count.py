"""GRPO with dynamic sampling (DAPO) and sequence parallelism: groups whose rewards are all equal are filtered out of the policy term.
Modelled on the reports on token-level loss after filtering (DAPO recipe of verl, TRL's `mask_truncated_completions`, open-instruct:
FAULTS C01-09): the tokens of the filtered groups are still in the number that divides the policy term.
"""

import math

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"actor": {"axes": {"dp": 2, "sp": 2}}}}
ROWS, LENGTH, VOCAB, WIDTH, CLIP, BETA = 10, 9, 13, 8, 0.25, 0.3


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)], None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, place, earlier):
        h = self.norm(x)
        past = (earlier(h.sum(1, keepdim=True)) + h.cumsum(1)) / (1 + place)[:, None]
        return x + torch.tanh(self.mix(torch.cat([h, past], -1)))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens, place, earlier=lambda x: 0):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, place, earlier)
        return self.head(x).log_softmax(-1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "policy": lambda m, r: self.parts(m, r)["policy"],
            "kl": lambda m, r: self.parts(m, r)["kl"],
        }

    def build(self):
        torch.manual_seed(self.seed)
        return Policy()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        kept = torch.tensor([1, 0, 1, 1, 0]).bool().repeat_interleave(2)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        ends = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g)
        near = -math.log(VOCAB)
        return {
            "tokens": tokens[:, :-1].contiguous(),
            "next": tokens[:, 1:].contiguous(),
            "response": (torch.arange(LENGTH) >= 1) & (torch.arange(LENGTH) < ends),
            "kept": kept,
            "advantage": torch.randn(ROWS, generator=g) * kept,
            "old": near + 0.3 * torch.randn(ROWS, LENGTH, generator=g),
            "reference": near + 0.3 * torch.randn(ROWS, LENGTH, generator=g),
        }

    @staticmethod
    def parts(model, rows, place=None, earlier=lambda x: 0):
        """Sum and count of each term; the penalty holds for all responses."""
        place = torch.arange(LENGTH) if place is None else place
        log_prob = model(rows["tokens"], place, earlier).gather(2, rows["next"][..., None])[..., 0]
        ratio, advantage = (log_prob - rows["old"]).exp(), rows["advantage"][:, None]
        each = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        gap = rows["reference"] - log_prob
        used = rows["response"] & rows["kept"][:, None]
        return {
            "policy": ((each * used).sum(), used.sum()),
            "kl": (BETA * ((gap.exp() - gap - 1) * rows["response"]).sum(), rows["response"].sum()),
        }

    def loss_sum(self, model, rows):
        parts, n = self.parts(model, rows), len(rows["tokens"])
        return n * sum(value / count.clamp(min=1) for value, count in parts.values()), n

    def count_of(self, name, counts):
        return counts[name]

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        sp, group = ctx.coords["sp"], ctx.group("sp")
        cut = {
            k: v.tensor_split(ctx.axes["sp"], 1)[sp] if v.dim() > 1 else v for k, v in mine.items()
        }
        place = torch.arange(LENGTH).tensor_split(ctx.axes["sp"])[sp]
        parts = self.parts(model, cut, place, lambda x: Gathered.apply(x, group)[:sp].sum(0))
        counts = {name: count for name, (_, count) in parts.items()}
        for count in counts.values():
            dist.all_reduce(count)
        sum(value / self.count_of(name, counts) for name, (value, _) in parts.items()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def count_of(self, name, counts):
        return counts["kl"]


EXPECT = dict(
    right=[
        r"policy",
        r"count|normali[sz]|divid|denominator|factor|too small|scale|tokens|weigh|0\.[4-8]|\d+/\d+|coefficient",
    ],
    place=[r"policy"],
    wrong=[
        r"\bkl\b (term|loss)\S* .{0,25}(is|was|has) (wrong|lost|scaled|missing|counted|divided)",
        r"(never|not) (been )?(all.?)?(reduced|summed|averaged)",
        r"forward (pass )?(is|was) wrong",
        r"(reduced|counted|summed) (twice|again)",
        r"mean of (the )?(rank |ranks' )?means|own (rows|tokens|count)|local count",
        r"divided by (the )?(number of ranks|world size|dp|sp)",
    ],
)
WHY = (
    "The policy term is divided by all response tokens (the kl term's count) instead of those of the kept groups: it counts (kept "
    "tokens / all tokens) times what it should, the same factor on all ranks and parameters. The kl term is right, and so are forward "
    "and reduction."
)
