"""Unified sequence parallelism (USP: Ulysses inside, ring outside) on 2 x 2 ranks: a causal language model whose sequence of twelve is cut into four chunks of three; inside the Ulysses group heads are
exchanged for sequence, so that a rank holds three of six heads for a block of six, and the keys and values of the blocks go round the ring (here gathered at once). Two micro-batches, gradients summed
over all four ranks.

The bug: the sequence is dealt out with the ring as the inner index (chunk = ulysses * ring size + ring), whereas the attention takes it for granted that a Ulysses group holds one contiguous block and that
block number = ring number. After reports about extract_local and the order of ranks in long-context-attention (yunchang) and its users.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"ring": 2, "ulysses": 2}}}}
ROWS, LENGTH, VOCABULARY, HEADS, DEPTH = 5, 12, 13, 6, 3
WIDTH = HEADS * DEPTH


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 20), nn.GELU(), nn.Linear(20, WIDTH))

    def forward(self, x, attend):
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, DEPTH)).unbind(2)
        x = x + self.out(attend(q, k, v).flatten(2))
        return x + self.mlp(self.norm_2(x))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, positions, attend):
        x = self.words(ids) + self.places(positions)
        for block in self.blocks:
            x = block(x, attend)
        return self.head(x)


def causal_attention(q, k, v, start=0):
    """(rows, sequence, heads, depth); the queries begin at `start`, the keys at zero."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / DEPTH**0.5
    later = torch.arange(k.shape[1]) > start + torch.arange(q.shape[1])[:, None]
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(later, -1e9).softmax(-1), v)


class Exchange(torch.autograd.Function):
    """Piece i of dimension 0 goes to rank i of the group."""

    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(fctx, grad):
        out = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, grad.contiguous(), group=fctx.group)
        return out, None


class GatherBlocks(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        fctx.group, fctx.length = group, x.shape[1]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad.split(fctx.length, 1)[dist.get_rank(fctx.group)], None


class UnifiedAttention:
    def __init__(self, ctx):
        self.ring, self.ulysses = ctx.group("ring"), ctx.group("ulysses")
        self.ring_rank, self.size = ctx.coords["ring"], ctx.axes["ulysses"]

    def to_heads(self, x):
        x = x.unflatten(2, (self.size, -1)).permute(2, 0, 1, 3, 4)
        return Exchange.apply(x.contiguous(), self.ulysses).permute(1, 0, 2, 3, 4).flatten(1, 2)

    def to_sequence(self, x):
        x = x.unflatten(1, (self.size, -1)).permute(1, 0, 2, 3, 4)
        return Exchange.apply(x.contiguous(), self.ulysses).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def __call__(self, q, k, v):
        q, k, v = (self.to_heads(x) for x in (q, k, v))
        start = self.ring_rank * q.shape[1]
        k, v = (
            GatherBlocks.apply(k.contiguous(), self.ring),
            GatherBlocks.apply(v.contiguous(), self.ring),
        )
        return self.to_sequence(causal_attention(q, k, v, start))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Language()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], torch.arange(LENGTH), causal_attention)
        loss = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")
        return loss, rows["labels"].numel()

    def extract_local(self, x, ctx):
        """The own chunk of dimension -1."""
        chunks = x.chunk(ctx.axes["ring"] * ctx.axes["ulysses"], -1)
        return chunks[ctx.coords["ring"] * ctx.axes["ulysses"] + ctx.coords["ulysses"]]

    def step(self, model, batch, ctx):
        attend = UnifiedAttention(ctx)
        for p in model.parameters():
            p.grad = None
        positions = self.extract_local(torch.arange(LENGTH), ctx)
        for n in range(2):
            ids, labels = (batch[k].tensor_split(2)[n] for k in ("ids", "labels"))
            logits = model(self.extract_local(ids, ctx), positions, attend)
            labels = self.extract_local(labels, ctx).flatten()
            loss = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
            (loss / batch["labels"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("ring", "ulysses"))


class Buggy(Clean):
    def extract_local(self, x, ctx):
        """The own chunk of dimension -1."""
        chunks = x.chunk(ctx.axes["ring"] * ctx.axes["ulysses"], -1)
        return chunks[ctx.coords["ulysses"] * ctx.axes["ring"] + ctx.coords["ring"]]


EXPECT = dict(
    right=[
        r"order|layout|chunk|transpos|interleav|permut|(ring|ulysses).{0,30}(inner|outer|index)|strided|contiguous|wrong (part|slice|piece|stretch)",
        r"sequence|position|chunk|token|column|slice|stretch",
        r"causal|mask|attention|attend|ring|ulysses|extract_local",
    ],
    place=[r"extract_local", r"UnifiedAttention|causal_attention", r"chunks?\["],
    wrong=[
        r"label.{0,40}(shift|misalign)|labels (of|from) (another|other)",
        r"(missing|not) .{0,15}(all.?reduce|reduced)|wrong group.{0,30}(gradient|reduc)",
        r"position (embedding|ids).{0,30}(start|restart|from zero)",
        r"backward of (the )?(gather|exchange)|adjoint.{0,20}wrong",
        r"divisor|counted twice",
    ],
)
WHY = (
    "With ring = outer and ulysses = inner, rank (r, u) has to hold chunk 2r + u, because after the Ulysses exchange the two chunks of a group are laid one after the other and masked as block r. extract_local gives "
    "chunk 2u + r: ranks (0, 1) and (1, 0) hold each other's chunks (2 and 1), ids, positions and labels alike. So the blocks are chunks {0, 2} and {1, 3}, and the causal mask, which goes by the place in the "
    "gathered keys, lets chunk 2 be unseen or seen where it must not. Every parameter's gradient is wrong on all ranks. Nothing is lost or counted twice, and labels belong to their tokens. Fix: ring * ulysses size + ulysses."
)
