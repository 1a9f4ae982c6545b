"""Packed documents, each of which counts alike in the loss (mean over its tokens), cut over three context ranks. After FAULTS
C18-08 (Megatron-LM PR 6115, packed layout and its sequences) and C04-02, and per-sample loss of packed SFT (Megatron-Bridge,
Axolotl): the length is that of the part on this rank.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH, DOCUMENTS = 5, 15, 12, 8, 4


class Gathered(torch.autograd.Function):
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


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.up, self.down = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)

    def forward(self, x, hidden, everyone):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = (q @ everyone(k).mT / WIDTH**0.5).masked_fill(hidden, -torch.inf)
        x = x + self.out(scores.softmax(-1) @ everyone(v))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens, documents, positions, all_documents, everyone=lambda x: x):
        hidden = (torch.arange(LENGTH) > positions[:, None]) | (
            documents[..., None] != all_documents[:, None]
        )
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, hidden, everyone)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        cuts = 1 + torch.stack(
            [torch.randperm(LENGTH - 1, generator=g)[: DOCUMENTS - 1] for _ in range(ROWS)]
        )
        documents = (torch.arange(LENGTH) >= cuts.sort(1).values[..., None]).sum(1)
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "documents": documents}

    @staticmethod
    def token_losses(logits, labels):
        return F.cross_entropy(logits.mT, labels, reduction="none")

    @staticmethod
    def lengths(documents):
        return F.one_hot(documents, DOCUMENTS).sum(1)

    def loss_sum(self, model, rows):
        documents = rows["documents"]
        logits = model(rows["tokens"], documents, torch.arange(LENGTH), documents)
        losses = self.token_losses(logits, rows["labels"]) / self.lengths(documents).gather(
            1, documents
        )
        return losses.sum(), len(documents) * DOCUMENTS

    def global_lengths(self, documents):
        lengths = self.lengths(documents)
        dist.all_reduce(lengths)
        return lengths

    def step(self, model, batch, ctx):
        mine = {k: v.chunk(ctx.world_size, dim=1)[ctx.rank] for k, v in batch.items()}
        positions = torch.arange(LENGTH).chunk(ctx.world_size)[ctx.rank]
        logits = model(
            mine["tokens"], mine["documents"], positions, batch["documents"], Gathered.apply
        )
        losses = self.token_losses(logits, mine["labels"])
        losses = losses / self.global_lengths(mine["documents"]).gather(1, mine["documents"])
        (losses.sum() / (ROWS * DOCUMENTS)).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def global_lengths(self, documents):
        return self.lengths(documents)


EXPECT = dict(
    right=[
        r"weigh|normali[sz]|divi|count|length|denominator|mean|scale",
        r"own|local|shard|document|each rank|per.?rank|token|position|sequence|rows|part",
    ],
    place=[
        r"loss",
        r"(all|every|each) ranks?|ranks? \W?[012]",
        r"(all|every|each) param|all (of )?(the )?(gradients|weights)",
        r"rows|tokens",
    ],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"reduced (twice|again)",
        r"forward (pass )?(is|was) (wrong|different)|(output|forward) of \S*(embed|blocks|head)\S* (is|was) wrong",
        r"backward .{0,20}(of|in) (the )?(gather|attention)",
        r"all gradients are (\d+|\S+) times",
        r"detach|no_grad",
    ],
)
WHY = (
    "Each rank divides its tokens' losses by the length of the part of the document that it holds: tokens of documents that cross "
    "a border weigh too much, those of documents inside one shard are right. The logits are right; the gradients of all parameters "
    "are wrong, on all ranks alike after the sum."
)
