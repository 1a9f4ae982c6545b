"""One attention block used in every stage of a pipeline (Zamba, ALBERT, universal transformers). After FAULTS C11-04 and C11-05 and
Megatron-LM's embedding group (first and last stage), reused here for the shared block, which the middle stage uses as well.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH, MICRO_BATCHES = 8, 6, 16, 6, 2
PARTS = [("shared", "embed", "first"), ("shared", "second"), ("shared", "third", "norm", "head")]


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.RMSNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.RMSNorm(WIDTH),
            nn.Linear(WIDTH, 22),
            nn.Linear(11, WIDTH),
        )

    def forward(self, x):
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.shared = nn.Embedding(VOCAB, WIDTH), Shared()
        self.first, self.second, self.third = Own(), Own(), Own()
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def stage(self, number, x):
        if number == 0:
            x = self.embed(x)
        own = getattr(self, ("first", "second", "third")[number])
        x = own(self.shared(x))
        return self.head(self.norm(x)) if number == 2 else x


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        padding = torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].masked_fill(padding, -100)}

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        x = rows["tokens"]
        for number in range(3):
            x = model.stage(number, x)
        return self.token_loss(x, rows["labels"]), (rows["labels"] != -100).sum()

    def sharing_stages(self):
        return [0, 1, 2]

    def distribute(self, model, ctx):
        self.group = dist.new_group(self.sharing_stages())
        for name in [n for n, _ in model.named_children() if n not in PARTS[ctx.rank]]:
            delattr(model, name)
        return model

    def step(self, model, batch, ctx):
        count, held = (batch["labels"] != -100).sum(), []
        for tokens, labels in zip(
            batch["tokens"].chunk(MICRO_BATCHES), batch["labels"].chunk(MICRO_BATCHES)
        ):
            x = tokens
            if ctx.rank > 0:
                x = torch.empty(*tokens.shape, WIDTH, dtype=ctx.dtype)
                dist.recv(x, ctx.rank - 1)
                x.requires_grad_()
            y = model.stage(ctx.rank, x)
            if ctx.rank < 2:
                dist.send(y.detach(), ctx.rank + 1)
            else:
                y = self.token_loss(y, labels) / count
            held.append((x, y))
        for x, y in held:
            grad = torch.ones_like(y)
            if ctx.rank < 2:
                dist.recv(grad, ctx.rank + 1)
            y.backward(grad)
            if ctx.rank > 0:
                dist.send(x.grad, ctx.rank - 1)
        if ctx.rank in self.sharing_stages():
            for param in model.shared.parameters():
                dist.all_reduce(param.grad, group=self.group)


class Buggy(Clean):
    def sharing_stages(self):
        return [0, 2]


EXPECT = dict(
    right=[
        r"shared",
        r"(middle|second) stage|stage 1|ranks? \W?1\b|\b1\b.{0,40}(missing|left out|not)|(not|never|n't|no|missing|"
        r"without|lacks?|only).{0,60}(reduc|summed|combin|added|stage|rank)|partial|differ",
    ],
    place=[r"shared", r"ranks? \W?[012]", r"middle stage|stage 1"],
    wrong=[
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"(embed|first|second|third|norm|head)\.\S* (is|are|was|were) (wrong|missing|(not|never) (reduced|summed))",
        r"micro-?batch(es)? .{0,12}(is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "The gradients of shared.* are summed over the first and the last stage only: ranks 0 and 2 lack the part of the middle stage, "
    "rank 1 holds its own part alone. Everything else is right."
)
