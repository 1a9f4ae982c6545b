"""A relative position bias shared by the layers of three pipeline stages, tied embeddings in the first and the last, two data-parallel
ranks. After Megatron-LM's T5 (`_allreduce_position_embedding_grads` over its own group, beside the embedding group of first and last
stage) and FAULTS C11: the bias is summed over the group of the tied embeddings.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 3}}}}
ROWS, LENGTH, WIDTH, HEADS, VOCABULARY, BUCKETS, MICRO_BATCHES = 10, 8, 8, 2, 19, 4, 2
STAGES = "first", "second", "third"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = (
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )
        self.up, self.down = nn.Linear(WIDTH, 13, bias=False), nn.Linear(13, WIDTH, bias=False)

    def forward(self, x, bias):
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class T5Like(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.relative = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BUCKETS, HEADS)
        self.first, self.second, self.third = Block(), Block(), Block()
        self.norm = nn.RMSNorm(WIDTH)

    def bias(self):
        at = torch.arange(LENGTH)
        back = at[:, None] - at
        bias = self.relative(back.clamp(0, BUCKETS - 1)).permute(2, 0, 1)
        return bias.masked_fill(back < 0, -torch.inf)

    def logits(self, x):
        return self.norm(x) @ self.embed.weight.T

    def forward(self, ids):
        x = self.embed(ids)
        for name in STAGES:
            x = getattr(self, name)(x, self.bias())
        return self.logits(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return T5Like()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.token_loss(model(rows["ids"]), rows["labels"]), (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        self.stage = ctx.coords["pp"]
        for i, name in enumerate(STAGES):
            if i != self.stage:
                delattr(model, name)
        if self.stage == 1:
            del model.embed
        if self.stage != 2:
            del model.norm
        self.ring = dist.get_process_group_ranks(ctx.group("pp"))
        for row in ctx.mesh.mesh.tolist():
            group = dist.new_group([row[0], row[-1]])
            if ctx.rank in row:
                self.embedding_group = group
        return model

    def bias_group(self, ctx):
        return ctx.group("pp")

    def shared_gradients(self, model, ctx):
        if self.stage != 1:
            dist.all_reduce(model.embed.weight.grad, group=self.embedding_group)
        group = self.bias_group(ctx)
        if ctx.rank in dist.get_process_group_ranks(group):
            dist.all_reduce(model.relative.weight.grad, group=group)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        micros = [
            {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            for i in range(MICRO_BATCHES)
        ]
        count, held, at = (batch["labels"] != -100).sum(), [], self.stage
        for rows in micros:
            if at == 0:
                x = model.embed(rows["ids"])
            else:
                x = torch.empty(*rows["ids"].shape, WIDTH, dtype=ctx.dtype)
                dist.recv(x, self.ring[at - 1])
                x.requires_grad_()
            y = getattr(model, STAGES[at])(x, model.bias())
            if at < 2:
                dist.send(y.detach().contiguous(), self.ring[at + 1])
            else:
                y = self.token_loss(model.logits(y), rows["labels"]) / count
            held.append((x, y))
        for x, y in held:
            grad = None
            if at < 2:
                grad = torch.empty_like(y)
                dist.recv(grad, self.ring[at + 1])
            y.backward(grad)
            if at > 0:
                dist.send(x.grad.contiguous(), self.ring[at - 1])
        self.shared_gradients(model, ctx)
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def bias_group(self, ctx):
        return self.embedding_group


EXPECT = dict(
    right=[
        r"relative",
        r"(not|never|n't|no|missing|without|lacks?|un|only)[ -]?.{0,50}(reduc|summed|sum\b|added|combin|stage|rank|contribut|part)|"
        r"partial|own (part|share|stage|layer)|differ\w*|left out",
    ],
    place=[r"relative"],
    wrong=[
        r"(embed|first|second|third|norm)\.\S* (is|are|has|have|was|were) (a )?wrong",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"mean of (the )?(rank |ranks' )?means",
        r"(not|never) (all.?)?(reduced|summed) over (the )?(dp|data)\b",
    ],
)
WHY = (
    "relative.weight lies on all three stages but is summed over the group of the first and the last alone: stages 0 and 2 hold the "
    "sum of their two parts without the middle stage's, stage 1 holds its own part only. "
    "The sum over dp is right, and so are the tied embedding and all other gradients."
)
