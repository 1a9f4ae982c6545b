"""A small causal language model with an activated LoRA (peft, aLoRA) on three context-parallel ranks (parts of 4, 3 and 3 of ten places). The adapters on `query` and `up` act from the call word of each row
to its end; peft takes for each row how many of the last places are active. Keys and values are gathered over the ranks, with gradient. Two micro-batches (3 and 2 rows). Adapters and head are trained;
their gradients are summed over the ranks.

The bug: each rank looks for the call word in its own part only; a rank behind the call finds none and leaves the adapter off in the row. After peft's aLoRA (pull request 2609, Activated LoRA) whose
offsets are counted from the end of the input it is given, and the many reports on sequence-parallel code that reads whole-row facts off the own part.
"""

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
WORDS, WIDTH, LENGTH, CALL = 13, 8, 10, 12
CALLS = [1, 5, 8, 3, 4]  # the place of the call word in each row
PARTS = [(0, 3), (3, 5)]


class GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bounds, group):
        ctx.group, ctx.own = group, bounds[dist.get_rank(group)]
        shapes = [(x.shape[0], high - low, x.shape[2]) for low, high in bounds]
        widest = max(s[1] for s in shapes)
        padded = F.pad(x, (0, 0, 0, widest - x.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in bounds]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([p[:, : s[1]] for p, s in zip(parts, shapes)], 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[:, ctx.own[0] : ctx.own[1]], None, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key_value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, active, low, gather):
        y = self.norm(x)
        q = self.query(y, alora_offsets=active)
        k, v = gather(self.key_value(y)).chunk(2, -1)
        places = torch.arange(low, low + x.shape[1])
        later = torch.arange(k.shape[1]) > places[:, None]
        scores = (q @ k.transpose(1, 2) / WIDTH**0.5).masked_fill(later, float("-inf"))
        x = x + scores.softmax(-1) @ v
        return x + self.down(F.gelu(self.up(x, alora_offsets=active)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.bounds, self.rank, self.group = [(0, LENGTH)], 0, None

    def gather(self, x):
        return x if self.group is None else GatherParts.apply(x, self.bounds, self.group)

    def forward(self, ids, active):
        low, high = self.bounds[self.rank]
        x = self.words(ids) + self.places(torch.arange(low, high))
        for block in self.blocks:
            x = block(x, active, low, self.gather)
        return self.head(x)


def active_places(ids):
    """How many places, counted from the end, the adapter acts on; None without a call word."""
    found = []
    for row in ids:
        at = (row == CALL).nonzero()
        found.append(len(row) - int(at[-1]) if len(at) else None)
    return found


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = LoraConfig(
            r=2,
            lora_alpha=6,
            target_modules=["query", "up"],
            init_lora_weights=False,
            alora_invocation_tokens=[CALL],
            task_type="CAUSAL_LM",
        )
        model = inject_adapter_in_model(config, Net())
        for p in model.head.parameters():
            p.requires_grad_(True)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(CALL, (len(CALLS), LENGTH), generator=g)
        labels = torch.randint(CALL, (len(CALLS), LENGTH), generator=g)
        for row, at in enumerate(CALLS):
            ids[row, at] = CALL
        return {"ids": ids, "labels": labels}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], active_places(rows["ids"])).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum")
        return loss, rows["labels"].numel()

    def distribute(self, model, ctx):
        edges = [0, 4, 7, 10]
        model.bounds = list(zip(edges[:-1], edges[1:]))
        model.rank, model.group = ctx.rank, ctx.group("cp")
        return model

    def active(self, ids, low, high):
        behind = [n - (LENGTH - high) if n else 0 for n in active_places(ids)]
        return [min(max(n, 0), high - low) or None for n in behind]

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        low, high = model.bounds[ctx.rank]
        for first, last in PARTS:
            ids, labels = batch["ids"][first:last], batch["labels"][first:last, low:high]
            logits = model(ids[:, low:high], self.active(ids, low, high)).flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
            (loss / batch["labels"].numel()).backward()
        for p in model.parameters():
            if p.requires_grad:
                dist.all_reduce(p.grad, group=ctx.group("cp"))


class Buggy(Clean):
    def active(self, ids, low, high):
        return active_places(ids[:, low:high])


EXPECT = dict(
    right=[
        r"query|up\b|lora|adapter|alora_offsets|active",
        r"forward|mask|offset|off\b|not (applied|active|called)|missing|zero|input|argument|rows?|places?|differ",
    ],
    place=[r"query|up\b|lora|alora_offsets|active"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"mean of (the )?means|wrong divisor|own count",
        r"rank 0('s)? .{0,40}(query|up|lora).{0,20}(is|are) wrong",
        r"key_value .{0,20}(adapter|not gathered)|gather.{0,20}backward",
        r"lora.{0,20}(scaling|alpha) .{0,20}wrong",
    ],
)
WHY = (
    "The calls lie at places 1, 5, 8, 3, 4 of rows 0 to 4; parts are 0-3, 4-6, 7-9. Rank 1 finds no call in rows 0 and 3 (it lies on rank 0) and leaves query's and up's adapter off there, right is all 3 "
    "places (rows 1 and 4, with the call in its part, are right, row 2 is right: none). Rank 2 finds only row 2's call; rows 0, 1, 3, 4 are off, right is all 3 places. Rank 0 gets the right offsets in all "
    "rows. Both micro-batches are hit (rank 1: rows 0 | 3; rank 2: rows 0, 1 | 3, 4). First wrong value: block 0's query on ranks 1 and 2 in forward. Gather, its backward, divisor 50 and the sum over ranks "
    "are right. Fix: offset of the whole row less the places behind the own part, clipped to the part."
)
