"""Pre-training with a weight per token, sequences dealt to two context-parallel ranks in zigzag (parts 0 and 3, 1 and 2). After
Megatron-LM's `get_batch_on_this_cp_rank`, which must treat every key of the batch, and NeMo / ms-swift threads on loss masks under
context parallelism: a key that came later is cut in two contiguous halves.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3, "cp": 2}}}}
ROWS, LENGTH, WIDTH, VOCABULARY, MICRO_BATCHES = 11, 12, 8, 21, 2


class Gathered(torch.autograd.Function):
    """Parts of all ranks, back in the order of the sequence; backward: summed, own positions."""

    @staticmethod
    def forward(ctx, x, group, order, mine):
        ctx.group, ctx.mine = group, mine
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)[:, order.argsort()]

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[:, ctx.mine], None, None, None


def rotate(x, positions):
    angle = positions[:, None] / 10.0 ** torch.arange(0, 1, 2 / WIDTH)
    a, b = x.chunk(2, -1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.up, self.down = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)

    def forward(self, x, positions, whole):
        h = self.norm1(x)
        k, v = whole(rotate(self.key(h), positions)), whole(self.value(h))
        seen = torch.arange(LENGTH) <= positions[:, None]
        x = x + self.out(
            F.scaled_dot_product_attention(rotate(self.query(h), positions), k, v, attn_mask=seen)
        )
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, positions, whole=lambda x: x):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, positions, whole)
        return self.head(self.norm(x))


class Clean:
    zigzag_keys = "ids", "labels", "weights"

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(5, LENGTH + 1, (ROWS, 1), generator=g)
        weights = torch.rand(ROWS, LENGTH, generator=g) + torch.linspace(0, 1, LENGTH)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:],
            "weights": weights * (torch.arange(LENGTH) < lengths),
        }

    @staticmethod
    def token_loss(logits, rows):
        losses = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="none")
        return (losses * rows["weights"].flatten()).sum()

    def loss_sum(self, model, rows):
        return self.token_loss(model(rows["ids"], torch.arange(LENGTH)), rows), rows[
            "weights"
        ].sum()

    def step(self, model, batch, ctx):
        cp, size, at = ctx.group("cp"), ctx.axes["cp"], ctx.coords["cp"]
        parts = torch.arange(LENGTH).chunk(2 * size)
        dealt = [torch.cat([parts[i], parts[2 * size - 1 - i]]) for i in range(size)]
        order, positions = torch.cat(dealt), dealt[at]
        mine = {}
        for key, value in batch.items():
            rows = value.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
            mine[key] = rows[:, positions] if key in self.zigzag_keys else rows.chunk(size, 1)[at]
        total = mine["weights"].sum()
        dist.all_reduce(total)
        for i in range(MICRO_BATCHES):
            rows = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            logits = model(
                rows["ids"], positions, lambda x: Gathered.apply(x, cp, order, positions)
            )
            (self.token_loss(logits, rows) / total).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    zigzag_keys = "ids", "labels"


EXPECT = dict(
    right=[
        r"loss|weight(s|ing)? (of|per|for)|token|position|label|target",
        r"wrong|other|differ|order|permut|misalign|shift|mismatch|weight|coefficient|layout|not the same|scale",
    ],
    place=[
        r"loss|weights|label|target",
        r"head|logits",
        r"(all|every|each) (parameters?|ranks?)",
        r"\bcp\b",
    ],
    wrong=[
        r"never (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"(embed|blocks\.\d|norm)\S* .{0,30}first wrong",
        r"(output|forward) of (the )?(model|blocks\.\d|embed|head)\S* (is|was|are|were) wrong|forward (pass )?(is|was) wrong",
        r"mean of (the )?(rank |ranks' )?means|divided by (its|their) own",
        r"detach|no_grad",
    ],
)
WHY = (
    "Tokens and labels of a cp rank are parts 0+3 or 1+2 of the sequence, but its loss weights are those of the first or the second "
    "half, so half of the token losses on each rank are multiplied with the weights of other positions. "
    "The forward and the divisor are right; the loss and the gradients of all parameters are wrong on all ranks."
)
