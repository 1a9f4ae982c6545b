"""A causal text model with a window of seven words, its sequence of 13 words cut over three ranks (context parallel: 5, 4 and 4 words), two micro-batches. Keys and values of all ranks are fetched (with gradient), and a rank goes through the blocks
in the order of a ring, its own first. Masks of blocks are made once and kept. Labels are shifted before the cut; gradients are summed over the ranks; the divisor is the number of all words.

The bug: a mask is kept under its size (queries, keys) and not under where the block lies, so that a later block of the size of an earlier one gets the earlier one's mask. After meta-pytorch/torchtitan's lru_cache for attention masks
(pytorch/torchtitan PR 2117, Remove caching for attention masks) and EricLBuehler/mistral.rs PR 283 (Fix mask caching).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
VOCABULARY, TOKENS, WIDTH, HEADS, WINDOW, ROWS = 13, 13, 8, 2, 7, 5
CUTS = [0, 5, 9, 13]
PARTS = [(0, 2), (2, 5)]


class Fetch(torch.autograd.Function):
    """The pieces of all ranks along dimension 2, and the sum of the gradients of one's own."""

    @staticmethod
    def forward(ctx, x, rank, group):
        ctx.rank, ctx.group = rank, group
        pieces = []
        for r in range(len(CUTS) - 1):
            piece = (
                x.contiguous().clone()
                if r == rank
                else x.new_empty(*x.shape[:2], CUTS[r + 1] - CUTS[r], x.shape[3])
            )
            dist.broadcast(piece, dist.get_global_rank(group, r), group=group)
            pieces.append(piece)
        return tuple(pieces)

    @staticmethod
    def backward(ctx, *grads):
        own = None
        for r, grad in enumerate(grads):
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, group=ctx.group)
            own = grad if r == ctx.rank else own
        return own, None, None


class Masks:
    """Which keys a block of queries may see: not later ones, and not those beyond the window."""

    def __init__(self, placed=True):
        self.placed, self.kept = placed, {}

    def block(self, q, k):
        key = (q, k) if self.placed else (q[1] - q[0], k[1] - k[0])
        if key not in self.kept:
            back = torch.arange(*q)[:, None] - torch.arange(*k)[None]
            self.kept[key] = (back >= 0) & (back < WINDOW)
        return self.kept[key]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.joint, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.masks, self.rank, self.group = Masks(), None, None

    def forward(self, x):
        q, k, v = self.joint(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.group is None:
            blocks = [((0, x.shape[1]), k, v)]
            mine = (0, x.shape[1])
        else:
            ranks = len(CUTS) - 1
            keys, values = (
                Fetch.apply(k, self.rank, self.group),
                Fetch.apply(v, self.rank, self.group),
            )
            order = [(self.rank - hop) % ranks for hop in range(ranks)]
            blocks = [((CUTS[r], CUTS[r + 1]), keys[r], values[r]) for r in order]
            mine = (CUTS[self.rank], CUTS[self.rank + 1])
        scores = []
        for where, keys_there, _ in blocks:
            score = q @ keys_there.transpose(-1, -2) * q.shape[-1] ** -0.5
            scores.append(score.masked_fill(~self.masks.block(mine, where), float("-inf")))
        weights = torch.cat(scores, -1).softmax(-1)
        o = weights @ torch.cat([values_there for _, _, values_there in blocks], 2)
        return self.out(o.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.5)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attentions = nn.ModuleList(Attention() for _ in range(2))
        self.wide, self.narrow = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, first=0):
        x = self.embed(ids) + self.places[first : first + ids.shape[1]]
        for norm, attention in zip(self.norms, self.attentions):
            x = x + attention(norm(x))
        return self.head(x + self.narrow(F.silu(self.wide(x))))


class Clean:
    placed = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        text = torch.randint(VOCABULARY, (ROWS, TOKENS + 1), generator=g)
        return {"ids": text[:, :-1].clone(), "labels": text[:, 1:].clone()}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"]).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum")
        return loss, rows["labels"].numel()

    def distribute(self, model, ctx):
        masks = Masks(self.placed)
        for attention in model.attentions:
            attention.masks, attention.rank = masks, ctx.rank
            attention.group = ctx.group("cp")
        return model

    def step(self, model, batch, ctx):
        words = batch["labels"].numel()
        first, last = CUTS[ctx.rank], CUTS[ctx.rank + 1]
        for low, high in PARTS:
            logits = model(batch["ids"][low:high, first:last], first).flatten(0, 1)
            labels = batch["labels"][low:high, first:last].flatten()
            (F.cross_entropy(logits, labels, reduction="sum") / words).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("cp"))


class Buggy(Clean):
    placed = False


EXPECT = dict(
    right=[
        r"(?i)attentions?|mask|softmax|block|bb_08\w*\.py:\d+",
        r"(?i)mask|forward|goes wrong|softmax|positions?|places?",
        r"(?i)ranks? (1|2)|positions?|places?|mask",
    ],
    place=[r"(?i)attentions?|mask|softmax|block|bb_08\w*\.py:\d+"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|sum over cp .{0,20}missing",
        r"(?i)mean of means|divi(ded|des) by (its|their) own (count|rows)|wrong (loss )?divisor",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|(only|from) (in )?micro.?batch 1",
        r"(?i)backward of Fetch is wrong|labels? .{0,20}(is|are) (wrong|shifted)",
        r"(?i)position (ids|embedding).{0,30}wrong|places .{0,20}(of the wrong|start)",
        r"(?i)only (on )?rank [012]\b|rank 0('s)? .{0,25}(goes wrong|is wrong in)",
    ],
)
WHY = (
    "Masks.block keeps a mask under the block's size (queries, keys) instead of its place. Each rank goes through its own block first. Rank 0 (5 words): its own 5 x 5 right, then 5 x 4 of rank 2's keys (all hidden), reused for rank 1's keys, where "
    "all is hidden as well: right. Rank 1 (words 5-8): 4 x 4 of its own (triangle), 4 x 5 of rank 0's keys right, and for rank 2's keys (4 x 4) the triangle again: it sees later words 9-12, which must be hidden. Rank 2 (words 9-12): own triangle, "
    "for rank 1's keys (4 x 4) the triangle again in place of the window's mask (earlier words that must be seen are hidden), 4 x 5 of rank 0's right. So both attentions go wrong in the forward on ranks 1 and 2, in all rows and micro-batches; "
    "all gradients are wrong. Fetch, labels, sum and divisor are right. Fix: key the kept masks by where the block lies."
)
