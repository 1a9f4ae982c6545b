"""Ulysses sequence parallelism of an encoder: ten tokens are padded to twelve, so that three ranks hold four each. After verl's
ulysses_pad_and_slice_inputs and the reports on sequence lengths that the ranks do not divide (DeepSpeed-Ulysses, diffusers; FAULTS
C19): all rows have the full length, so no mask is given, and the padding is attended.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
ROWS, LENGTH, WORDS, HEADS, SIZE, TAGS, MICRO_BATCHES = 8, 10, 15, 3, 3, 4, 2
WIDTH, PAD = HEADS * SIZE, 0


class Exchange(torch.autograd.Function):
    """x[i] goes to rank i"""

    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, grad.contiguous())
        return out


def tokens_to_heads(x):
    """(rows, own tokens, heads, size) -> (rows, tokens, own heads, size)"""
    x = x.unflatten(2, (dist.get_world_size(), -1)).permute(2, 0, 1, 3, 4)
    return Exchange.apply(x).transpose(0, 1).flatten(1, 2)


def heads_to_tokens(x):
    x = x.unflatten(1, (dist.get_world_size(), -1)).transpose(0, 1)
    return Exchange.apply(x).permute(1, 2, 0, 3, 4).flatten(2, 3)


def same(x):
    return x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)

    def forward(self, x, mask, scatter, gather):
        y = self.norm1(x)
        q, k, v = (
            scatter(f(y).unflatten(-1, (HEADS, SIZE))).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(2 * q, k, v, attn_mask=mask)
        x = x + self.out(gather(y.transpose(1, 2)).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, TAGS)

    def forward(self, words, places, mask=None, scatter=same, gather=same):
        x = self.words(words) + self.places(places)
        for block in self.blocks:
            x = block(x, mask, scatter, gather)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Encoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tags = torch.randint(TAGS, (ROWS, LENGTH), generator=g)
        return {
            "words": torch.randint(1, WORDS, (ROWS, LENGTH), generator=g),
            "tags": tags.masked_fill(torch.rand(ROWS, LENGTH, generator=g) < 0.2, -100),
        }

    @staticmethod
    def tag_loss(logits, tags):
        return F.cross_entropy(logits.mT, tags, reduction="sum")

    def loss_sum(self, model, rows):
        logits = model(rows["words"], torch.arange(LENGTH))
        return self.tag_loss(logits, rows["tags"]), (rows["tags"] != -100).sum()

    def mask(self, padded):
        return (torch.arange(padded) < LENGTH)[None]

    def step(self, model, batch, ctx):
        count = (batch["tags"] != -100).sum()
        missing = -LENGTH % ctx.world_size
        padded = {
            "words": F.pad(batch["words"], (0, missing), value=PAD),
            "tags": F.pad(batch["tags"], (0, missing), value=-100),
        }
        mine = {k: v.chunk(ctx.world_size, 1)[ctx.rank] for k, v in padded.items()}
        places = (
            torch.arange(LENGTH + missing).clamp(max=LENGTH - 1).chunk(ctx.world_size)[ctx.rank]
        )
        mask = self.mask(LENGTH + missing)
        for i in range(MICRO_BATCHES):
            rows = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            logits = model(rows["words"], places, mask, tokens_to_heads, heads_to_tokens)
            (self.tag_loss(logits, rows["tags"]) / count).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def mask(self, padded):
        return None


EXPECT = dict(
    right=[
        r"blocks\.0|attention|mask|pad",
        r"forward|output|activation|input of|values? (of|at|in)|pad|mask|attend",
    ],
    place=[r"blocks\.0", r"attention|mask|pad", r"(all|every|each|three) ranks?|ranks? \W?[012]"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"forward (pass )?(is|was) (right|exact|correct)$",
        r"(output|forward) of (the )?(words|places|blocks\.0\.(norm1|q|k|v))\S* (is|was) wrong|first wrong .{0,20}(words|places|norm1)",
        r"mean of (the )?(rank |ranks' )?means",
        r"loss .{0,20}(divided|normali[sz]ed) by",
    ],
)
WHY = (
    "The two padding tokens are keys of every head, so each token's attention spreads over twelve keys instead of ten. The forward is "
    "wrong from the attention of blocks.0 on (its q, k and v are right for the "
    "real tokens), on all ranks, and with it the gradients of all parameters (but k.bias, zero either way); the embedding of word 0, "
    "which does not occur, even gets one."
)
