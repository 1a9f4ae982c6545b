"""Frame classification with a small Conformer-like encoder (relative positions of Transformer-XL: content and position terms with the biases u and v, the position scores put in place by the `rel_shift` trick of padding and reshaping), data
parallel 2 x context parallel 2. Each cp rank has the queries of its own frames (6 and 5 of 11), keys and values are gathered from all cp ranks; the table of 2T - 1 relative positions is on every rank.

The bug: rel_shift is called on the scores of the own queries against the whole table. The trick has no argument for where the queries lie: with fewer queries than keys it takes them for the last ones (so it was written, for a memory of earlier
segments). The table must be cut first, so that it begins at the position of the shard's last query. After questions on ESPnet's and NeMo's rel_shift with streaming chunks and with sequence parallelism.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "cp": 2}}}}
ROWS, FRAMES, MELS, WIDTH, HEADS, PHONES, IGNORE = 7, 11, 6, 12, 3, 9, -100


class GatherFrames(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, span, group):
        ctx.span, ctx.group = span, group
        whole = x.new_zeros(x.shape[0], FRAMES, x.shape[2])
        whole[:, span] = x
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g, group=ctx.group)
        return g[:, ctx.span], None, None


def relative_table(dtype):
    """Sinusoids of the relative positions T - 1, ..., 0, ..., -(T - 1)."""
    position = torch.arange(FRAMES - 1, -FRAMES, -1, dtype=torch.float64)[:, None]
    rate = 10000.0 ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    return torch.cat([(position * rate).sin(), (position * rate).cos()], -1).to(dtype)


def rel_shift(x):
    b, h, queries, positions = x.shape
    x = F.pad(x, (1, 0)).reshape(b, h, positions + 1, queries)[:, :, 1:]
    return x.reshape(b, h, queries, positions)[..., :FRAMES]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.position, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.bias_u = nn.Parameter(0.3 * torch.randn(HEADS, 1, WIDTH // HEADS))
        self.bias_v = nn.Parameter(0.3 * torch.randn(HEADS, 1, WIDTH // HEADS))

    @staticmethod
    def heads(x):
        return x.unflatten(-1, (HEADS, -1)).transpose(-2, -3)

    def forward(self, x, valid, shard):
        k, v = self.k(x), self.v(x)
        if shard.group is not None:
            k = GatherFrames.apply(k, shard.span, shard.group)
            v = GatherFrames.apply(v, shard.span, shard.group)
        q, k, v = self.heads(self.q(x)), self.heads(k), self.heads(v)
        table = relative_table(x.dtype)[shard.table]
        p = self.heads(self.position(table))
        content = (q + self.bias_u) @ k.transpose(-1, -2)
        place = rel_shift((q + self.bias_v) @ p.transpose(-1, -2))
        scores = (content + place) * (WIDTH // HEADS) ** -0.5
        scores = scores.masked_fill(~valid[:, None, None], float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, valid, shard):
        x = x + self.attention(self.norm(x), valid, shard)
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Shard:
    def __init__(self, span=slice(0, FRAMES), table=slice(None), group=None):
        self.span, self.table, self.group = span, table, group


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(MELS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, PHONES)
        self.shard = Shard()

    def forward(self, mels, valid):
        x = self.enter(mels)
        for layer in self.layers:
            x = layer(x, valid, self.shard)
        return self.head(x)


class Clean:
    cut_table = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Encoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        length = torch.randint(4, FRAMES + 1, (ROWS, 1), generator=g)
        valid = torch.arange(FRAMES) < length
        phones = torch.randint(PHONES, (ROWS, FRAMES), generator=g)
        return {
            "mels": torch.randn(ROWS, FRAMES, MELS, generator=g),
            "valid": valid,
            "phones": phones.masked_fill(~valid, IGNORE),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["mels"], rows["valid"]).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["phones"].flatten(), reduction="sum")
        return loss, int(rows["valid"].sum())

    def distribute(self, model, ctx):
        own = torch.arange(FRAMES).tensor_split(ctx.axes["cp"])[ctx.coords["cp"]]
        span = slice(int(own[0]), int(own[-1]) + 1)
        # from T - 1 - (the last own query) on, so that rel_shift finds its place
        table = slice(FRAMES - span.stop, None) if self.cut_table else slice(None)
        model.shard = Shard(span, table, ctx.group("cp"))
        return model

    def step(self, model, batch, ctx):
        count = int(batch["valid"].sum())
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        span = model.shard.span
        rows = dict(mine, mels=mine["mels"][:, span], phones=mine["phones"][:, span])
        (self.loss_sum(model, rows)[0] / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp", "cp"))


class Buggy(Clean):
    cut_table = False


EXPECT = dict(
    right=[
        r"(?i)forward|output|activation",
        r"(?i)position|rel.?shift|offset|table|shard|sequence|context|\bcp\b|attention|queries|local",
    ],
    place=[r"(?i)attention|rel.?shift|position"],
    wrong=[
        r"(?i)(whole|entire) forward (is|was) (right|correct)|forward and (the )?loss (are|is|agree)|\bloss (is|are) (right|correct)",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their) own|factor of (1/)?[24]\b",
        r"(?i)(padding|valid) mask .{0,20}(missing|ignored)|attends to padding",
        r"(?i)(gather|backward) .{0,30}(drops|loses) .{0,20}gradient",
    ],
)
WHY = (
    "rel_shift of n own queries against the table of 2T - 1 positions gives query i the positions of query T - n + i: right for the last cp rank (coordinate 1), for the first (queries 0..5) each query is taken for one 5 frames later. The "
    "forward goes wrong first in layers.0.attention on the ranks with cp = 0 (the scores of the position term; enter, norm, q, k, v and the content term are right); on cp = 1 the attention of layers.0 is right, and from layers.1 on its keys "
    "and values come from wrong frames of cp = 0. The loss of the frames of cp = 0 is wrong at once. All parameters get wrong gradients, in direction, the same on all ranks after the sum (but k.bias, whose gradient is zero in both, since a "
    "softmax does not see it); reduction group, count, mask and rows are right. Fix: cut the table at T - (end of the own queries) before the product, or gather the positions by index."
)
