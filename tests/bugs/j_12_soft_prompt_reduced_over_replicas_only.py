"""Prompt tuning of a frozen causal model: three learned vectors in front of the tokens, the sequence cut over two ranks beside two
replicas. After PEFT prompt tuning under DeepSpeed-Ulysses and ring attention (replicated parameters see one part of the sequence) and
FAULTS C05-01/C05-13: the prompt is taken for complete on every sequence rank.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"tune": {"axes": {"dp": 2, "sp": 2}}}}
ROWS, LENGTH, PROMPT, VOCAB, WIDTH = 7, 9, 3, 10, 8


class Everyone(torch.autograd.Function):
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


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.SiLU(), nn.Linear(12, WIDTH))

    def forward(self, x, where, everyone):
        y = self.norm1(x)
        scores = self.q(y) @ everyone(self.k(y)).mT / WIDTH**0.5
        later = torch.arange(scores.size(-1)) > where[:, None]
        x = x + scores.masked_fill(later, float("-inf")).softmax(-1) @ everyone(self.v(y))
        return x + self.mlp(self.norm2(x))


class Prompted(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(0.3 * torch.randn(PROMPT + LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.requires_grad_(False)
        self.prompt = nn.Parameter(0.5 * torch.randn(PROMPT, WIDTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens, where, everyone=lambda x: x):
        x = torch.cat([self.prompt.expand(len(tokens), -1, -1), self.embed(tokens)], dim=1)
        x = (x + self.position)[:, where]
        for block in self.blocks:
            x = block(x, where, everyone)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Prompted()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g)
        labels = tokens[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100)
        return {"tokens": tokens[:, :-1], "labels": F.pad(labels, (PROMPT, 0), value=-100)}

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        logits = model(rows["tokens"], torch.arange(PROMPT + LENGTH))
        return self.token_loss(logits, rows["labels"]), (rows["labels"] != -100).sum()

    def prompt_group(self, ctx):
        return ctx.group("dp", "sp")

    def step(self, model, batch, ctx):
        sp = ctx.group("sp")
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        where = torch.arange(PROMPT + LENGTH).chunk(ctx.axes["sp"])[ctx.coords["sp"]]
        logits = model(mine["tokens"], where, lambda x: Everyone.apply(x, sp))
        loss = self.token_loss(logits, mine["labels"][:, where])
        (loss / (batch["labels"] != -100).sum()).backward()
        for name, param in model.named_parameters():
            if param.requires_grad:
                group = self.prompt_group(ctx) if name == "prompt" else ctx.group("dp", "sp")
                dist.all_reduce(param.grad, group=group)


class Buggy(Clean):
    def prompt_group(self, ctx):
        return ctx.group("dp")


EXPECT = dict(
    right=[
        r"prompt",
        r"\bsp\b|ranks? \W?[13]|sequence|zero|no gradient|missing|own (part|chunk|shard)|differ",
    ],
    place=[r"prompt"],
    wrong=[
        r"(norm|head)\S* (is|are|has|have|was) (a )?(wrong|missing|not)",
        r"reduced (twice|again)|counted (twice|\d times)",
        r"mean of (the )?means",
        r"forward (pass )?(is|was) wrong",
        r"(not|never) \S*(reduced|summed) over (the )?(replica\w*|dp\b)",
        r"detach|no_grad",
        r"wrong on (all|every|each) ranks?",
    ],
)
WHY = (
    "The prompt lies in the chunk of the first sequence rank, so its gradient arises there only (through the gathered keys and "
    "values, too); reduced over dp alone, ranks 1 and 3 (sp 1) keep zero and ranks 0 and 2 are right. norm and head are right "
    "everywhere."
)
