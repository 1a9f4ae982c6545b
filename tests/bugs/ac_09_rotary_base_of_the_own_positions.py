"""Long-context finetuning of a small decoder with dynamic NTK scaling of its rotary embedding, context parallel over three ranks: a rank has a consecutive part of each sequence (5, 5 and 4 tokens), global positions, and keys and values of all ranks by a differentiable gather. The base of the rotation grows with the length of the sequence as soon as that is
longer than the model was trained for.

The bug: the length is taken from the largest of the given positions, which on a rank is the end of its own part. The ranks rotate by different bases, and queries meet keys of another base. Origin: `seq_len = torch.max(position_ids) + 1` in the dynamic rope of transformers (dynamic_rope_update), under ring and context parallel attention with global position ids.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
WORDS, WIDTH, HEADS, INNER, LENGTH, ROWS, IGNORE = 19, 16, 2, 20, 14, 4, -100
TRAINED, BASE, FACTOR = 6, 50.0, 2.0


class Gather(torch.autograd.Function):
    """(rows, heads, own, d) -> (rows, heads, LENGTH, d), parts of unequal length."""

    @staticmethod
    def forward(ctx, x, group, start):
        ctx.group, ctx.start, ctx.n = group, start, x.shape[2]
        whole = x.new_zeros(*x.shape[:2], LENGTH, x.shape[3])
        whole[:, :, start : start + ctx.n] = x
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g[:, :, ctx.start : ctx.start + ctx.n].clone(), None, None


class Context:
    def __init__(self, ctx, agree):
        self.group, self.rank, self.size, self.agree = (
            ctx.group("cp"),
            ctx.rank,
            ctx.world_size,
            agree,
        )

    def own(self, x):
        return x.tensor_split(self.size, 1)[self.rank]


class Rotary(nn.Module):
    def forward(self, x, places, context):
        longest = places.max() + 1
        if context is not None and context.agree:
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=context.group)
        d, base = x.shape[-1], torch.tensor(BASE, dtype=x.dtype)
        if longest > TRAINED:
            base = base * (FACTOR * longest / TRAINED - (FACTOR - 1)) ** (d / (d - 2))
        angle = places[:, None].to(x.dtype) * base ** (-torch.arange(0, d, 2, dtype=x.dtype) / d)
        cos, sin = (f(angle).repeat(1, 2) for f in (torch.cos, torch.sin))
        one, two = x.chunk(2, -1)
        return x * cos + torch.cat([-two, one], -1) * sin


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.rotary = Rotary()

    def forward(self, x, places, context):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k = (self.rotary(t, places, context) for t in (q, k))
        if context is not None:
            k, v = (Gather.apply(t, context.group, int(places[0])) for t in (k, v))
        mask = torch.arange(k.shape[2]) <= places[:, None]
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(a.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.context = None

    def forward(self, ids, places):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, places, self.context)
        return self.head(self.norm(x))


class Clean:
    agree = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        model = Decoder()
        for block in model.blocks:
            nn.init.normal_(block.qkv.weight, std=0.5)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        text = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=g)
        prompt = torch.randint(0, 7, (ROWS, 1), generator=g)
        labels = text[:, 1:].masked_fill(torch.arange(LENGTH) < prompt, IGNORE)
        return {"ids": text[:, :-1].clone(), "labels": labels}

    @staticmethod
    def token_loss(logits, labels):
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        return loss, (labels != IGNORE).sum()

    def loss_sum(self, model, rows):
        return self.token_loss(model(rows["ids"], torch.arange(LENGTH)), rows["labels"])

    def distribute(self, model, ctx):
        model.context = Context(ctx, self.agree)
        return model

    def step(self, model, batch, ctx):
        own, group = model.context.own, ctx.group("cp")
        places = own(torch.arange(LENGTH)[None])[0]
        loss, count = self.token_loss(model(own(batch["ids"]), places), own(batch["labels"]))
        dist.all_reduce(count, group=group)
        (loss / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    agree = False


EXPECT = dict(
    right=[
        r"(?i)rotary|rope|attention|position|forward|blocks\.0",
        r"(?i)rotary|rope|position|base|frequenc|length|angle|attention|forward|first wrong",
    ],
    place=[r"(?i)rotary|rope|attention|blocks\.0|position|base|frequenc"],
    wrong=[
        r"(?i)forward (is|values? (are|is)) right|forward .{0,12}agrees",
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their|the) own|wrong normali[sz]er",
        r"(?i)positions? (start|restart|begin)s? (at|from|with)|position (ids|numbers) (is|are) wrong",
        r"(?i)masks? (is|are) wrong|sees the future|later tokens",
        r"(?i)(labels?|targets?) (is|are) (wrong|other|shifted)",
        r"(?i)backward of \S+ is wrong|wrong adjoint|rank 2 (alone|only)|only (on )?rank 2",
    ],
)
WHY = (
    "The base depends on the length of the sequence; the ranks take their own largest position + 1: 5, 10, 14 instead of 14 each. Rank 0 is below the trained length of 6 and does not scale at all, rank 1 scales too little, rank 2 is right. The first wrong values are those of blocks.0.rotary (q and k) on ranks 0 and 1; rank 2's own rotation is right, but it attends to the keys of the others, "
    "so its attention in blocks.0 is wrong from there on. Embeddings, norm and qkv of blocks.0 are right; position numbers, mask, gather and its backward, labels, count, the sum over ranks are right. All gradients are wrong, equal on all ranks. "
    "Fix: the maximum over the ranks of the context group (or the known length of the whole sequence)."
)
