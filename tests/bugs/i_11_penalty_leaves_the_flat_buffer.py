"""A decoder whose gradients are views of one flat buffer that is all-reduced at once, with a penalty on the embedding added by hand.
After PyTorch threads on `gradient_as_bucket_view` and Megatron's contiguous gradient buffers (a .grad that is assigned anew no longer
lies in the buffer): the penalty's gradient is added out of place.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WIDTH, VOCABULARY, MICRO_BATCHES, PENALTY = 14, 7, 8, 18, 2, 0.003


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 15), nn.Linear(15, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"tokens": self.token_sum, "penalty": lambda m, r: (self.penalty(m), 1)}

    def build(self):
        torch.manual_seed(self.seed)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    @staticmethod
    def token_sum(model, rows):
        labels = rows["labels"]
        loss = F.cross_entropy(model(rows["ids"]).flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()

    @staticmethod
    def penalty(model):
        return PENALTY * model.embed.weight.square().sum()

    def loss_sum(self, model, rows):
        loss, count = self.token_sum(model, rows)
        return loss + count * self.penalty(model), count

    def attach(self, model):
        params = list(model.parameters())
        self.buffer = params[0].new_zeros(sum(p.numel() for p in params))
        for param, view in zip(params, self.buffer.split([p.numel() for p in params]), strict=True):
            param.grad = view.view_as(param)

    def add_penalty(self, model, share):
        weight = model.embed.weight
        weight.grad.add_(weight.detach(), alpha=2 * PENALTY * share)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        self.attach(model)
        count = (batch["labels"] != -100).sum()
        for i in range(MICRO_BATCHES):
            loss, _ = self.token_sum(
                model, {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            )
            (loss / count).backward()
        self.add_penalty(model, 1 / ctx.world_size)
        dist.all_reduce(self.buffer)


class Buggy(Clean):
    def add_penalty(self, model, share):
        weight = model.embed.weight
        weight.grad = weight.grad + 2 * PENALTY * share * weight.detach()


EXPECT = dict(
    right=[
        r"embed",
        r"(not|never|n't|no|missing|without|lacks?|un|only)[ -]?.{0,50}(reduc|summed|sum\b|added|combin|synchroni|averag)|partial|"
        r"own (part|rows|share)|local|differ\w*",
    ],
    place=[r"embed"],
    wrong=[
        r"(blocks|norm|head)\S* (is|are|has|have|was|were) (a )?wrong",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"mean of (the )?(rank |ranks' )?means",
        r"(all|every) parameters? (is|are) (wrong|not reduced)",
    ],
)
WHY = (
    "The penalty's gradient is added out of place, so embed.weight.grad is a new tensor outside the flat buffer, and the all-reduce "
    "of the buffer does not reach it: each rank keeps the gradient of its own rows and a third of the penalty. "
    "All other parameters are right."
)
