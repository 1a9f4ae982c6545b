"""DPO with sequences cut over three context-parallel ranks (keys and values gathered), two data-parallel ones. After the
sequence-parallel DPO of 360-LLaMA-Factory and TRL / axolotl threads on it: the log-probabilities of the answers must be summed over the
ranks of a sequence before the sigmoid.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"policy": {"axes": {"dp": 2, "cp": 3}}}}
PAIRS, LENGTH, WIDTH, VOCABULARY, BETA = 7, 12, 8, 19, 0.7


class Gathered(torch.autograd.Function):
    """The whole sequence (dim 1); backward: the sum of all ranks' gradients for the own part."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), 1)[dist.get_rank(ctx.group)], None


class Summed(torch.autograd.Function):
    """A sum over ranks that all go on with the same value."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)

    def forward(self, x, positions, whole):
        h = self.norm1(x)
        k, v = whole(self.key(h)), whole(self.value(h))
        seen = torch.arange(k.shape[1]) <= positions[:, None]
        x = x + self.out(F.scaled_dot_product_attention(self.query(h), k, v, attn_mask=seen))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, positions, whole=lambda x: x):
        x = self.embed(ids) + self.position(positions)
        for block in self.blocks:
            x = block(x, positions, whole)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Policy()

    def batch(self):
        """ids, labels and the reference's token log-probabilities: (pairs, chosen / rejected, tokens)"""
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (PAIRS, 2, LENGTH + 1), generator=g)
        prompt = torch.randint(2, 5, (PAIRS, 1, 1), generator=g)
        ids[:, 1] = torch.where(torch.arange(LENGTH + 1) < prompt[:, 0], ids[:, 0], ids[:, 1])
        ends = torch.randint(6, LENGTH + 1, (PAIRS, 2, 1), generator=g)
        at = torch.arange(LENGTH)
        return {
            "ids": ids[..., :-1],
            "labels": ids[..., 1:].masked_fill((at < prompt - 1) | (at >= ends), -100),
            "reference": -1 - 2 * torch.rand(PAIRS, 2, LENGTH, generator=g),
        }

    @staticmethod
    def log_ratios(logits, rows):
        """(pairs, 2): sums over the tokens at hand"""
        labels = rows["labels"]
        log_p = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).flatten(0, 1)[..., None])
        return ((log_p.view(labels.shape) - rows["reference"]) * (labels != -100)).sum(-1)

    @staticmethod
    def preference_loss(ratios):
        return -F.logsigmoid(BETA * (ratios[:, 0] - ratios[:, 1])).sum()

    def loss_sum(self, model, rows):
        logits = model(rows["ids"].flatten(0, 1), torch.arange(LENGTH))
        return self.preference_loss(self.log_ratios(logits, rows)), len(rows["ids"])

    def over_sequence(self, ratios, group):
        return Summed.apply(ratios, group)

    def step(self, model, batch, ctx):
        cp = ctx.group("cp")
        positions = torch.arange(LENGTH).chunk(ctx.axes["cp"])[ctx.coords["cp"]]
        mine = {
            k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]][..., positions]
            for k, v in batch.items()
        }
        logits = model(mine["ids"].flatten(0, 1), positions, lambda x: Gathered.apply(x, cp))
        ratios = self.over_sequence(self.log_ratios(logits, mine), cp)
        (self.preference_loss(ratios) / PAIRS).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def over_sequence(self, ratios, group):
        return ratios


EXPECT = dict(
    right=[
        r"\bcp\b|context|sequence|part|shard|tokens",
        r"loss|sigmoid|margin|non.?linear|pairs?|rows?|ratio|log.?prob",
        r"own|partial|local|not (summed|reduced|combined)|only|part of|before|sum|differ|wrong|weight|coefficient",
    ],
    place=[
        r"loss|margin|sigmoid|ratio|log.?prob",
        r"\bcp\b|context",
        r"(all|every|each) (parameters?|ranks?)",
    ],
    wrong=[
        r"(gradients?|parameters?) (is|are|was|were) (never|not) (all.?)?reduced",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"(the )?(logits|model's output|forward pass|forward of the model) (is|are|was|were) (wrong|different)",
        r"(head|blocks\.\d|embed)\S* (is|are|was|were) .{0,20}first wrong",
        r"detach|no_grad",
    ],
)
WHY = (
    "Each cp rank puts the log-ratios of the tokens of its own sequence part into the sigmoid instead of the sum over the three "
    "parts, so each token's gradient is weighted with sigmoid(-beta * margin of the part). "
    "The logits are right on all ranks; the loss and the gradients of all parameters are wrong, in direction too."
)
