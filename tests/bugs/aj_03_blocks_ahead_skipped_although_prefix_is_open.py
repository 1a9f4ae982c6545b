"""Context parallelism (cp 3) of a prefix language model: rows of 12 tokens in shards of four; the tokens of the prefix (its length differs from row to row) see each other in both directions, the rest is causal. Keys and values are
gathered (the backward sums the gradients of all ranks), attention runs block by block with an online softmax. Two blocks of the model, two micro-batches.

The bug: the loop over the blocks is that of causal ring attention and skips every block that comes from a later rank, although a prefix can reach into it. Inside the blocks that are visited, the prefix mask is right. Compare
huggingface/accelerate PR 4177 (context parallelism silently replaces every mask by the causal one) and the skipping loop of zhuzilin/ring-flash-attention (issues 15 and 54 on what its causal case leaves out).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, TOKENS, SHARD, VOCABULARY, WIDTH, HEADS = 5, 12, 4, 9, 8, 2
PREFIX = [6, 3, 10, 2, 7]


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        first = dist.get_rank(ctx.group) * SHARD
        return grad[:, :, first : first + SHARD].contiguous(), None


def allowed(queries, keys, prefix):
    """(row, 1, query, key): may this query see this key?"""
    causal = keys[None, :] <= queries[:, None]
    return (causal[None] | (keys[None, None] < prefix[:, None, None]))[:, None]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.group, self.skip_later = None, False

    def blocks(self, q, k, v, prefix):
        rank = dist.get_rank(self.group)
        queries = torch.arange(rank * SHARD, rank * SHARD + SHARD, device=q.device)
        top = q.new_full(q.shape[:3], float("-inf"))
        total, acc = torch.zeros_like(top), torch.zeros_like(q)
        for turn in range(dist.get_world_size(self.group)):
            source = (rank - turn) % dist.get_world_size(self.group)
            if source > rank and (self.skip_later or source * SHARD >= int(prefix.max())):
                continue
            keys = torch.arange(source * SHARD, source * SHARD + SHARD, device=q.device)
            block = slice(source * SHARD, source * SHARD + SHARD)
            s = q @ k[:, :, block].transpose(-1, -2) * q.shape[-1] ** -0.5
            s = s.masked_fill(~allowed(queries, keys, prefix), float("-inf"))
            new = torch.maximum(top, s.detach().amax(-1))
            p, old = torch.exp(s - new[..., None]), torch.exp(top - new)
            total = total * old + p.sum(-1)
            acc = acc * old[..., None] + p @ v[:, :, block]
            top = new
        return acc / total[..., None]

    def forward(self, x, prefix):
        q, k, v = (
            f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        if self.group is None:
            every = torch.arange(TOKENS, device=x.device)
            mask = allowed(every, every, prefix)
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            o = self.blocks(q, Gathered.apply(k, self.group), Gathered.apply(v, self.group), prefix)
        return x + self.out(o.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.5)
        self.lower, self.upper = Attention(), Attention()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, prefix, first=0):
        x = self.embed(ids) + self.places[first : first + ids.shape[1]]
        return self.head(self.upper(F.layer_norm(self.lower(x, prefix), (WIDTH,)), prefix))


class Clean:
    skip_later = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
            "prefix": torch.tensor(PREFIX),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], rows["prefix"])
        return F.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum"
        ), rows["labels"].numel()

    def distribute(self, model, ctx):
        for block in (model.lower, model.upper):
            block.group, block.skip_later = ctx.group("cp"), self.skip_later
        return model

    def step(self, model, batch, ctx):
        first = ctx.rank * SHARD
        mine = slice(first, first + SHARD)
        for part in (slice(0, 3), slice(3, 5)):
            logits = model(batch["ids"][part, mine], batch["prefix"][part], first)
            loss = F.cross_entropy(
                logits.flatten(0, 1), batch["labels"][part, mine].flatten(), reduction="sum"
            )
            (loss / (ROWS * TOKENS)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("cp"))


class Buggy(Clean):
    skip_later = True


EXPECT = dict(
    right=[
        r"(?i)lower|attention|block|keys?|mask|prefix",
        r"(?i)forward|output|skip|mask|prefix|not seen|do(es)? not see|left out|missing|attend",
        r"(?i)rank(s)? 0|ranks 0 and 1|rank 1|rows?|earlier|later|first|lower|prefix|skip|mask",
    ],
    place=[r"(?i)lower|attention"],
    wrong=[
        r"(?i)forward is right|only (in )?the backward is wrong",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)(first|starts|begins|wrong) .{0,20}(on|at) rank 2\b",
        r"(?i)(adjoint|backward) of .{0,20}gather",
        r"(?i)lower\.(query|key|value).{0,20}(forward|output).{0,15}wrong|wrong position",
    ],
)
WHY = (
    "A query of the prefix must see all keys of the prefix, later ones as well. The loop skips every block from a later rank, so on rank 0 (tokens 0-3) the keys 4, 5, ... of the prefix are missing for the rows with a prefix longer "
    "than 4: row 0 (prefix 6: keys 4, 5), row 2 (10: keys 4-9) and row 4 (7: keys 4-6); on rank 1 (tokens 4-7) only row 2 loses keys (8, 9). Rows 1 and 3 (prefix 3 and 2) are right, rank 2 has no later block. Causal queries behind "
    "the prefix are right too. The forward goes wrong in `lower` (output of its attention, before lower.out) on rank 0 in both micro-batches (rows 0, 2; row 4) and on rank 1 in micro-batch 0 (row 2), and again in `upper`; on rank 2 "
    "it is wrong only from `upper` on, through the gathered keys and values. All parameters get a wrong gradient, the same on all ranks. Gather with summing backward, online softmax, mask inside the blocks, divisor 60 and the "
    "all-reduce are right. Fix: skip a block only if it starts at or behind the longest prefix."
)
