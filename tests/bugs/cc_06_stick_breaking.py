"""A causal language model with stick-breaking attention (each query breaks its stick from the nearest key backwards: w_ij = b_ij prod_{j<k<i} (1 - b_ik), no softmax, no positions), with the sequence cut over four
ranks. Keys and values of all shards are gathered; a rank walks over the key blocks from its own to the first one and carries along log of what is left of the stick. Two micro-batches, gradients summed over the ranks.

The bug: what is left is replaced at each block by that block's own log sum instead of being added to what was left before, so that from the third block on (ranks 2 and 3) the stick is whole again but for the last block passed.
After blockwise ports of stick-breaking and of gated/forgetting attention, whose carry between blocks is a running sum over ALL nearer blocks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 4}}}}
ROWS, LENGTH, VOCABULARY, WIDTH, HEADS = 5, 14, 11, 8, 2


class GatherSequence(torch.autograd.Function):
    """All shards of [batch, head, time, dim] on every rank; the ranks use them differently, their gradients add up."""

    @staticmethod
    def forward(fctx, own, start, group):
        fctx.start, fctx.stop, fctx.group = start, start + own.shape[2], group
        full = own.new_zeros(*own.shape[:2], LENGTH, own.shape[3])
        full[:, :, start : fctx.stop] = own
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad[:, :, fctx.start : fctx.stop], None, None


def block(q, k, v, rest, strict):
    """Output of one block of keys given the log of what is left of each query's stick, and the log of what the block leaves."""
    score = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    broken, kept = F.logsigmoid(score), F.logsigmoid(-score)
    if strict:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(0)
        kept = kept.masked_fill(later, 0.0)
    nearer = kept.flip(-1).cumsum(-1).flip(-1) - kept
    weight = torch.exp(broken + nearer + rest[..., None])
    if strict:
        weight = weight.masked_fill(later, 0.0)
    return weight @ v, kept.sum(-1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 15), nn.GELU(), nn.Linear(15, WIDTH)
        )

    def forward(self, x, attention):
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        x = x + self.out(attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, attention):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, attention)
        return self.head(x)


def whole_attention(q, k, v):
    return block(q, k, v, q.new_zeros(q.shape[:3]), True)[0]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], whole_attention)
        return F.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum"
        ), rows["ids"].numel()

    def walk_blocks(self, q, keys, values, me):
        """From the own block of keys back to the first."""
        y, rest = block(q, keys[me], values[me], q.new_zeros(q.shape[:3]), True)
        for b in reversed(range(me)):
            out, left = block(q, keys[b], values[b], rest, False)
            y = y + out
            rest = rest + left
        return y

    def step(self, model, batch, ctx):
        group, size, me = ctx.group("cp"), ctx.axes["cp"], ctx.coords["cp"]
        own = torch.arange(LENGTH).tensor_split(size)[me]

        def attention(q, k, v):
            keys, values = (
                GatherSequence.apply(t, int(own[0]), group).tensor_split(size, 2) for t in (k, v)
            )
            return self.walk_blocks(q, keys, values, me)

        for p in model.parameters():
            p.grad = None
        for n in range(2):
            ids, labels = (batch[k].tensor_split(2)[n][:, own] for k in ("ids", "labels"))
            logits = model(ids, attention)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            (loss / batch["ids"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def walk_blocks(self, q, keys, values, me):
        y, rest = block(q, keys[me], values[me], q.new_zeros(q.shape[:3]), True)
        for b in reversed(range(me)):
            out, rest = block(q, keys[b], values[b], rest, False)
            y = y + out
        return y


EXPECT = dict(
    right=[
        r"\brest\b|carry|carried|remain|running|accumul|stick|cumulative|left|walk_blocks|block|attention",
        r"overwr|replac|not (added|accumulated|summed|carried)|lost|forgot|dropp|instead of|only (the )?(last|latest|previous)|rank(s)? 2|later ranks|missing|third|earlier|wrong|differ|forward",
    ],
    place=[r"walk_blocks", r"\brest\b", r"\bblock\b", r"attention", r"\blogits\b"],
    wrong=[
        r"backward of GatherSequence.{0,40}wrong|GatherSequence.{0,40}(missing|twice)",
        r"parameters?.{0,30}(not|never) reduced|reduced twice|missing all.?reduce",
        r"labels?.{0,30}(shift|wrong)|divisor|denominator|mean of means|micro.?batch(es)?.{0,30}(lost|dropped|overwritten)",
    ],
)
WHY = (
    "walk_blocks has to add the log of what each key block leaves of the stick to rest; the buggy twin assigns it, so that for the block two or more before the own one only the block passed last counts and the nearer ones are forgotten. "
    "Ranks 0 and 1 attend rightly, ranks 2 and 3 give too much weight to far keys in both layers and both micro-batches; their forward is wrong and by the gathered keys and values the gradients of all ranks. "
    "A right cause says that the attention's forward over the blocks (rest, walk_blocks) is wrong on the later ranks because the carry is overwritten. Fix: rest = rest + left."
)
