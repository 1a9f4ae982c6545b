"""Long-sequence training after DeepSpeed's ALST: sequence parallel over two ranks (keys and values gathered), two replicas, and a TiledMLP that computes the MLP in tiles, recomputes each tile in the backward and narrows the incoming gradient and the
input gradient out of flat memory. DeepSpeed PR 7412 / 7422 ("looks like my code was working correctly only for batch_size=1"; found in axolotl PR 2865): the tiles are cut along dim 1, the gradients along flat memory.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "sp": 2}}}}
VOCABULARY, LENGTH, WIDTH, HEADS, ROWS, MICRO, TILES = 19, 10, 12, 2, 7, 2, 3


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.length = group, x.shape[1]
        pieces = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2)]
        dist.all_gather(pieces, x.contiguous(), group=group)
        return torch.cat(pieces, 1)

    @staticmethod
    def backward(ctx, g):
        g = g.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(g, group=ctx.group)
        return g.narrow(1, dist.get_rank(ctx.group) * ctx.length, ctx.length).contiguous(), None


def tokens_first(x):
    """The MLP does not care for the batch: one long row."""
    return x.reshape(1, -1, x.shape[-1])


def as_it_is(x):
    return x


class TiledMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, x, tiles, layout):
        ctx.fn, ctx.tiles, ctx.layout = fn, tiles, layout
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([fn(t) for t in layout(x).chunk(tiles, 1)], 1).view_as(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        shape, x = x.shape, ctx.layout(x.detach()).contiguous()
        g = g.contiguous()
        x_grad = torch.zeros_like(x)
        shards = x.chunk(ctx.tiles, 1)
        step = shards[0].numel()
        for i, shard in enumerate(shards):
            shard = shard.detach().requires_grad_()
            incoming = g.view(-1).narrow(0, i * step, shard.numel()).view(shard.shape)
            with torch.enable_grad():
                out = ctx.fn(shard)
            torch.autograd.backward(out, incoming)
            x_grad.view(-1).narrow(0, i * step, shard.numel()).copy_(shard.grad.flatten())
        return None, x_grad.view(shape), None, None


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(WIDTH, 17),
            nn.Linear(WIDTH, 17),
            nn.Linear(17, WIDTH),
        )
        self.layout = None

    def compute(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def forward(self, x):
        return (
            self.compute(x)
            if self.layout is None
            else TiledMLP.apply(self.compute, x, TILES, self.layout)
        )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.kv, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.mlp = MLP()
        self.group = None

    def forward(self, x, where):
        h = self.norm(x)
        kv = self.kv(h)
        if self.group is not None:
            kv = GatherSequence.apply(kv, self.group)
        q = self.q(h).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = kv.unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        later = torch.arange(k.shape[2]) > where[:, None]
        a = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -1e9).softmax(-1) @ v
        x = x + self.out(a.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, where):
        x = self.embed(ids) + self.place(where)
        for block in self.blocks:
            x = block(x, where)
        return self.head(self.norm(x))


class Clean:
    layout = staticmethod(tokens_first)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
        }

    @staticmethod
    def total(model, rows, where):
        logits = model(rows["ids"][:, where], where)
        return F.cross_entropy(
            logits.flatten(0, 1), rows["labels"][:, where].flatten(), reduction="sum"
        )

    def loss_sum(self, model, rows):
        return self.total(model, rows, torch.arange(LENGTH)), rows["labels"].numel()

    def distribute(self, model, ctx):
        for block in model.blocks:
            block.group, block.mlp.layout = ctx.group("sp"), self.layout
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(2)[ctx.mesh.get_local_rank("dp")] for k, v in batch.items()}
        where = torch.arange(LENGTH).chunk(2)[ctx.mesh.get_local_rank("sp")]
        for m in range(MICRO):
            part = {k: v.tensor_split(MICRO)[m] for k, v in mine.items()}
            (self.total(model, part, where) / batch["labels"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp", "sp"))


class Buggy(Clean):
    layout = staticmethod(as_it_is)


EXPECT = dict(
    right=[
        r"(?i)mlp|tiled",
        r"(?i)backward|gradient of|input gradient|recomput",
        r"(?i)blocks?|tile|order|token|row|position|permut|mix|shuffl|misalign|layout|memory|flat|slice|wrong place|swap|pair",
    ],
    place=[r"(?i)mlp|tiledmlp|tile"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|reduced (twice|again)",
        r"(?i)(head\S*|^norm\.\w+) (is|are) wrong|down\.bias (is|are) wrong in blocks\.1",
        r"(?i)divi(ded|des) by|divisor|factor (of )?(1/)?[0-9]",
        r"(?i)gather\S* .{0,30}(wrong|adjoint)|sequence gather",
        r"(?i)tiles? .{0,25}(lost|missing|dropped|counted twice)|(last|other) tiles? only|overwrit",
        r"(?i)dropout|random",
    ],
)
WHY = (
    "In the backward of TiledMLP the tiles are slices of [batch, sequence, hidden] along the sequence, but the incoming gradient and the input gradient are narrowed out of flat memory, which is row-major with the batch first. With more than one row in the micro-batch tile i is paired with the gradients of other (row, token) positions, and its input gradient "
    "is written to those positions: nothing is lost or doubled, but everything is paired wrongly. Ranks dp=0 have micro-batches of 2 + 2 rows, dp=1 of 2 + 1: the micro-batch with one row (second of dp=1) is right. Wrong on all ranks after the sum: blocks.*.mlp gate, up and down.weight (blocks.1.mlp.down.bias is right, as a sum over all tokens), "
    "and everything before through the input gradient: norm2, attention, embed, place, and all of blocks.0. Right: forward, loss, final norm, head, the gathers and reductions. Fix: flatten batch and sequence into one dimension before cutting (DeepSpeed 7422), or slice the gradients along dim 1 as well."
)
