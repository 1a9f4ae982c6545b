"""A language model under FSDP2 with a memory-saving cross entropy and a z-loss on the same logits. After Megatron-LM's fused cross entropy
(`vocab_parallel_logits -= logits_max`, in place) and reports of losses that read the logits after it: the z-loss sees logits whose
largest is zero.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WIDTH, HEADS, VOCABULARY, Z = 10, 9, 8, 2, 17, 0.03


def shifted(logits, top):
    return logits - top


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, shift):
        logits = shift(logits, logits.amax(-1, keepdim=True))
        valid, column = labels != -100, labels.clamp(min=0)[:, None]
        log_p = logits - logits.exp().sum(-1, keepdim=True).log()
        ctx.save_for_backward(log_p.exp(), column, valid)
        return -(log_p.gather(1, column)[:, 0] * valid).sum()

    @staticmethod
    def backward(ctx, grad):
        p, column, valid = ctx.saved_tensors
        d = p.scatter_add(1, column, -torch.ones_like(column, dtype=p.dtype))
        return grad * d * valid[:, None], None, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
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
    shift = staticmethod(shifted)

    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "cross_entropy": lambda m, r: (self.sums(m, r)[0], (r["labels"] != -100).sum()),
            "z": lambda m, r: (self.sums(m, r)[1], (r["labels"] != -100).sum()),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    @staticmethod
    def z_loss(logits, labels):
        return Z * (logits.logsumexp(-1).square() * (labels != -100)).sum()

    def sums(self, model, rows):
        logits, labels = model(rows["ids"]).flatten(0, 1), rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), self.z_loss(logits, labels)

    def loss_sum(self, model, rows):
        return sum(self.sums(model, rows)), (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        logits, labels = model(mine["ids"]).flatten(0, 1), mine["labels"].flatten()
        loss = CrossEntropy.apply(logits, labels, self.shift)
        loss = loss + self.z_loss(logits, labels)
        (loss / (batch["labels"] != -100).sum()).backward()


class Buggy(Clean):
    @staticmethod
    def shift(logits, top):
        return logits.sub_(top)


EXPECT = dict(
    right=[
        r"\bz\b|z.?loss|z term",
        r"wrong|differ|value|logits|in.?place|forward|loss|coefficient|scale|gradient|weight",
    ],
    place=[r"\bz\b|z.?loss", r"head", r"logits", r"(all|every|each) (parameters?|ranks?)"],
    wrong=[
        r"cross_entropy\S* .{0,30}(wrong|missing|counted|scaled)",
        r"(embed|blocks\.\d|norm)\S* .{0,30}first wrong",
        r"never (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"mean of (the )?(rank |ranks' )?means",
        r"detach|no_grad",
    ],
)
WHY = (
    "The cross entropy subtracts the largest logit in place, and the z-loss that follows squares the log-sum-exp of the shifted "
    "logits, between 0 and log 17, instead of the true one. "
    "The z term's value and gradient are wrong on every rank and token, so all gradients are wrong by their z part; the model's "
    "forward and the cross entropy are right."
)
