"""A clipped policy-gradient step on packed sequences with Ulysses sequence parallelism (all-to-all between heads and positions), data
parallelism of two, two micro-batches. After reports on verl's Ulysses path: the ids have to be rolled by one before they are cut over the
sequence ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "sp": 2}}}}
ROWS, LENGTH, VOCABULARY, WIDTH, HEADS, MICRO = 7, 11, 13, 16, 4, 2


def exchange(parts, shapes, group):
    """Sends parts[i] to the i-th rank; what comes from the i-th has shapes[i]."""
    source = torch.cat([p.flatten() for p in parts])
    sizes = [torch.Size(s).numel() for s in shapes]
    out = torch.empty(sum(sizes), dtype=source.dtype)
    dist.all_to_all_single(out, source, sizes, [p.numel() for p in parts], group=group)
    return [o.view(s) for o, s in zip(out.split(sizes), shapes, strict=True)]


def to_heads(x, lengths, me, group):
    b, _, h, d = x.shape
    n = len(lengths)
    got = exchange(x.chunk(n, 2), [(b, length, h // n, d) for length in lengths], group)
    return torch.cat(got, 1)


def to_positions(x, lengths, me, group):
    b, _, h, d = x.shape
    got = exchange(x.split(lengths, 1), [(b, lengths[me], h, d)] * len(lengths), group)
    return torch.cat(got, 2)


class ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *layout):
        ctx.layout = layout
        return to_heads(x, *layout)

    @staticmethod
    def backward(ctx, grad):
        return to_positions(grad, *ctx.layout), None, None, None


class ToPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *layout):
        ctx.layout = layout
        return to_positions(x, *layout)

    @staticmethod
    def backward(ctx, grad):
        return to_heads(grad, *ctx.layout), None, None, None


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 20), nn.GELU(), nn.Linear(20, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, positions, documents, enter=lambda x: x, leave=lambda x: x):
        """`documents` are those of the whole row; ids and positions may be a stretch."""
        x = self.embed(ids) + self.place(positions)
        y = self.norm1(x)
        q, k, v = (
            enter(f(y).unflatten(-1, (HEADS, -1))).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        same = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=same).transpose(1, 2)
        x = x + self.out(leave(mixed).flatten(2))
        return self.head(x + self.mlp(self.norm2(x)))


def policy_loss(logits, targets, old, advantage, mask):
    new = F.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
    ratio = (new - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.25) * advantage)
    return -(gain * mask).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Policy()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        cut = torch.randint(3, LENGTH - 2, (ROWS, 1), generator=g)
        t = torch.arange(LENGTH).expand(ROWS, LENGTH)
        documents = (t >= cut).long()
        positions = torch.where(t >= cut, t - cut, t)
        ends = (t == cut - 1) | (t == LENGTH - 1)  # the last token of a document has no target
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "documents": documents,
            "positions": positions,
            "mask": (positions >= 1) & ~ends,
            "old": torch.randn(ROWS, LENGTH, generator=g) * 0.3 - 2.6,
            "advantage": torch.randn(ROWS, LENGTH, generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], rows["positions"], rows["documents"])
        targets = rows["ids"].roll(-1, 1)
        loss = policy_loss(logits, targets, rows["old"], rows["advantage"], rows["mask"])
        return loss, rows["mask"].sum()

    def targets(self, ids, own):
        return ids.roll(-1, 1)[:, own]

    def step(self, model, batch, ctx):
        group, me = ctx.group("sp"), ctx.coords["sp"]
        stretches = torch.arange(LENGTH).tensor_split(ctx.axes["sp"])
        own = stretches[me]
        layout = ([len(s) for s in stretches], me, group)
        total = batch["mask"].sum()
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        for m in range(MICRO):
            rows = {k: v.tensor_split(MICRO)[m] for k, v in mine.items()}
            logits = model(
                rows["ids"][:, own],
                rows["positions"][:, own],
                rows["documents"],
                lambda x: ToHeads.apply(x, *layout),
                lambda x: ToPositions.apply(x, *layout),
            )
            rest = (rows[k][:, own] for k in ("old", "advantage", "mask"))
            loss = policy_loss(logits, self.targets(rows["ids"], own), *rest)
            (loss / total).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)


class Buggy(Clean):
    def targets(self, ids, own):
        return ids[:, own].roll(-1, 1)


EXPECT = dict(
    right=[
        r"loss|target|label|logit|head",
        r"\bsp\b|sequence|position|stretch|boundary|shift|roll|token|slice|target|label|rows?",
    ],
    place=[r"\bsp\b|sequence|stretch|position", r"loss|target|label|head|logit"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"mean of (the )?means|own (count|denominator|divisor)",
        r"all.?to.?all.{0,40}(wrong|backward)",
        r"(attention|activations?|logits?) (is|was|are|were) wrong",
    ],
)
WHY = (
    "The targets are rolled by one after the ids are cut over sp, so the last position of the first sequence stretch (sp rank 0) gets the "
    "first token of its own stretch as target and not the first one of the next. One token in each row where the mask is on has the "
    "wrong target; logits, counts and reductions are right. The gradient of all parameters is wrong through the loss on sp rank 0."
)
