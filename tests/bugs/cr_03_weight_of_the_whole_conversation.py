"""Instruction tuning of a decoder with sliding-window attention (4 tokens) with the square-root
weighting of conversations (each supervised token of a row weighs 1 / sqrt(supervised tokens of
the row), divided by the sum of the weights), DDP over three ranks, 11 conversations (4, 4, 3),
micro-batches of two.

Bug: the length of a conversation is taken from its padding mask, that is with the prompt, and not
from its labels. After "square averaging" of losses in multimodal fine-tuning code, where
the lengths of the packed samples are at hand and the supervised tokens are not.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
WORDS, D, T, ROWS, WINDOW, PAD = 14, 8, 9, 11, 4, 0


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(D, eps=1e-6)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.second = nn.RMSNorm(D, eps=1e-6)
        self.up = nn.Linear(D, 11)
        self.down = nn.Linear(11, D)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        ago = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        closed = (ago < 0) | (ago >= WINDOW)
        scores = (q @ k.transpose(1, 2) * D**-0.5).masked_fill(closed, float("-inf"))
        x = x + scores.softmax(-1) @ v
        return x + self.down(F.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, D)
        self.layers = nn.Sequential(Layer(), Layer())
        self.norm = nn.RMSNorm(D, eps=1e-6)

    def forward(self, ids):
        return self.norm(self.layers(self.words(ids))) @ self.words.weight.T


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 31)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 310)
        ids = torch.randint(1, WORDS, (ROWS, T + 1), generator=g)
        length = torch.randint(5, T + 2, (ROWS, 1), generator=g)
        prompt = (torch.rand(ROWS, 1, generator=g) * (length - 1)).long() + 1
        at = torch.arange(T + 1)
        ids = ids.masked_fill(at >= length, PAD)
        labels = ids.masked_fill((at < prompt) | (at >= length), -100)
        return {"ids": ids[:, :-1], "labels": labels[:, 1:]}

    def loss_sum(self, model, rows):
        logits, labels = model(rows["ids"]), rows["labels"]
        number = labels.ne(-100).sum(1)
        each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1)
        return (each / number.clamp(min=1).sqrt()).sum(), number.sqrt().sum().item()

    def lengths(self, rows):
        return rows["labels"].ne(-100).sum(1)

    def token_weights(self, rows):
        weight = self.lengths(rows).clamp(min=1).to(torch.get_default_dtype()).rsqrt()
        return weight[:, None] * rows["labels"].ne(-100)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        group, world = ctx.group("dp"), ctx.axes["dp"]
        rows = torch.arange(ROWS).tensor_split(world)[ctx.coords["dp"]]
        parts = [{k: v[i] for k, v in batch.items()} for i in rows.split(2)]
        weights = [self.token_weights(part) for part in parts]
        total = torch.stack([w.sum() for w in weights]).sum()
        dist.all_reduce(total, group=group)
        for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            last = i == len(parts) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                logits = model(part["ids"]).transpose(1, 2)
                each = F.cross_entropy(logits, part["labels"], reduction="none")
                ((each * weight).sum() * world / total).backward()


class Buggy(Clean):
    def lengths(self, rows):
        return rows["ids"].ne(PAD).sum(1)


EXPECT = dict(
    right=[
        r"length|weight|sqrt|square.root|token_weights|number of tokens",
        r"prompt|padding mask|pad\b|ids|unsupervised|all (the )?tokens|whole|non.?pad|input",
        r"label|supervised|answer|-100|target|loss tokens|scored|unmasked",
    ],
    place=[r"\blengths\b", r"token_weights", r"PAD", r"rsqrt", r"\btotal\b"],
    wrong=[
        r"DDP.{0,40}averag.{0,40}(twice|not undone|missing|wrong)",
        r"no_sync.{0,40}(wrong|last|miss)",
        r"(total|denominator|count).{0,40}(not|never|local).{0,20}(reduc|own rank)",
        r"window.{0,30}(wrong|wider|shift)",
        r"(mean of means|average of averages)",
    ],
)
WHY = """Each row's tokens weigh 1 / sqrt(number of its supervised tokens). Buggy.lengths counts
`ids != PAD`, the tokens of prompt and answer (and one shifted), in place of `labels != -100`, so
rows with long prompts weigh too little, in the loss and in the common divisor `total`. DDP,
no_sync and the sum of the divisor over ranks are right. All gradients are wrong alike, by other
weights of the rows. A right cause says that the weights come from the wrong length (prompt
included). Fix: count the labels that are not -100."""
