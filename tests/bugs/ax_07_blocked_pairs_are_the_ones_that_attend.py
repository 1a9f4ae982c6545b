"""Encoder with sequence parallelism by all-to-all (Ulysses) on three ranks: 3, 3 and 2 of 8 tokens outside the attention, one of three heads and all tokens inside. Which tokens may not look at each other is given per row
(`blocked`, true = not allowed, as nn.MultiheadAttention has it). Two micro-batches.

The bug: the parallel attention calls scaled_dot_product_attention and hands it `blocked` as it is. There a true means that the pair takes part. So tokens attend to exactly the pairs that are blocked. After pytorch issue
170400 / PR 170415 (boolean masks of SDPA are the inverse of MultiheadAttention's; "silent bugs during migration") and rasbt/LLMs-from-scratch issue 1061.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
ROWS, TOKENS, FEATURES, WIDTH, HEADS, CLASSES = 5, 8, 5, 9, 3, 4
OWN = [(0, 3), (3, 6), (6, 8)]
SIZES = [high - low for low, high in OWN]


def exchange(pieces, shapes, group):
    out = torch.cat([p.flatten() for p in pieces])
    got = [torch.Size(s).numel() for s in shapes]
    back = out.new_empty(sum(got))
    dist.all_to_all_single(back, out, got, [p.numel() for p in pieces], group=group)
    return [p.view(s) for p, s in zip(back.split(got), shapes)]


def to_head(x, group):
    """[rows, own tokens, heads, d] -> [rows, tokens, d] of the own head."""
    shapes = [(len(x), n, x.shape[3]) for n in SIZES]
    return torch.cat(exchange(list(x.unbind(2)), shapes, group), 1)


def to_tokens(x, group):
    shape = (len(x), SIZES[dist.get_rank(group)], x.shape[2])
    return torch.stack(exchange(list(x.split(SIZES, 1)), [shape] * len(SIZES), group), 2)


class ToHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return to_head(x, group)

    @staticmethod
    def backward(ctx, grad):
        return to_tokens(grad, ctx.group), None


class ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return to_tokens(x, group)

    @staticmethod
    def backward(ctx, grad):
        return to_head(grad, ctx.group), None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.group, self.as_it_is = None, False

    def forward(self, x, blocked):
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)) for f in (self.query, self.key, self.value))
        if self.group is None:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            scores = scores.masked_fill(blocked[:, None], float("-inf"))
            o = (scores.softmax(-1) @ v).transpose(1, 2)
        else:
            q, k, v = (ToHead.apply(t, self.group) for t in (q, k, v))
            mask = blocked if self.as_it_is else ~blocked
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            o = ToTokens.apply(o, self.group)
        return x + self.out(o.flatten(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, blocked):
        return self.head(self.norm(self.attention(F.silu(self.stem(x)), blocked)))


class Clean:
    as_it_is = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        blocked = torch.rand(ROWS, TOKENS, TOKENS, generator=g) < 0.4
        blocked = blocked | blocked.transpose(1, 2)
        place = torch.arange(TOKENS)
        blocked[:, place, place] = False
        blocked[:, place, (place + 3) % TOKENS] = True
        return {
            "x": torch.randn(ROWS, TOKENS, FEATURES, generator=g),
            "blocked": blocked,
            "label": torch.randint(CLASSES, (ROWS, TOKENS), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["x"], rows["blocked"]).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["label"].flatten(), reduction="sum")
        return loss, rows["label"].numel()

    def distribute(self, model, ctx):
        model.attention.group, model.attention.as_it_is = ctx.group("sp"), self.as_it_is
        return model

    def step(self, model, batch, ctx):
        mine = slice(*OWN[ctx.rank])
        for part in torch.arange(ROWS).split(3):
            logits = model(batch["x"][part, mine], batch["blocked"][part]).flatten(0, 1)
            label = batch["label"][part, mine].flatten()
            loss = F.cross_entropy(logits, label, reduction="sum")
            (loss / batch["label"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("sp"))


class Buggy(Clean):
    as_it_is = True


EXPECT = dict(
    right=[
        r"(?i)forward|mask|blocked|attend|allowed",
        r"(?i)attention",
        r"(?i)mask|blocked|invert|inverse|negat|opposite|attends? to|other tokens|(input|"
        r"output) of|differ|wrong|goes? wrong",
    ],
    place=[r"(?i)attention(\.out)?|mask"],
    wrong=[
        r"(?i)forward is right|wrong only in the backward|backward of .{0,20}(ToHead|"
        r"ToTokens).{0,20}wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)|"
        r"counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?3\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank \d|rank \d alone",
        r"(?i)(stem|attention\.(query|key|value)).{0,20}goes wrong|labels? .{0,20}(is|"
        r"are) wrong|order of (the )?heads",
    ],
)
WHY = (
    "On all three ranks (heads), rows and micro-batches the attention is made over exactly the blocked pairs instead of the allowed ones. stem, query, key, value are right in the forward and so is the exchange; the output of "
    "the attention, i.e. the input of attention.out, is the first wrong value, for all tokens. The backward fits the wrong forward. So the gradients of all parameters are wrong in direction (head and norm by their inputs). "
    "Divisor 40, all-to-all with its backward, labels and the sum over sp are right. Fix: attn_mask=~blocked."
)
