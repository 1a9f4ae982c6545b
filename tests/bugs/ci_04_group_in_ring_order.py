"""A speech encoder (framewise senone labels) whose time axis is cut over four ranks; attention
with a learnable relative position bias gathers keys and values of all ranks. The parts lie on
the ranks in a ring order that suits two machines, 0, 2, 1, 3: the second part of the time axis
lies on rank 2.

Bug: the group is made by new_group(ring order) and the gathered parts are joined as they come,
as if the group kept the order of its list; torch sorts the ranks of a group, so they come in
the order of the ranks. After topology-aware context-parallel groups (ranks listed in ring
order), cf. the docs of torch.distributed.new_group.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 4}}}}
FRAMES, MEL, WIDTH, HEADS, SENONES, ROWS = 11, 5, 6, 2, 7, 5
RING = [0, 2, 1, 3]


class GatherTime(torch.autograd.Function):
    """Parts (rows, own frames, d) of all members -> the parts joined, member `order[0]` first."""

    @staticmethod
    def forward(ctx, x, group, sizes, order):
        rank = dist.get_rank(group)
        widest = max(sizes)
        padded = F.pad(x, (0, 0, 0, widest - x.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        ctx.group, ctx.size = group, sizes[rank]
        ctx.start = sum(sizes[m] for m in order[: order.index(rank)])
        return torch.cat([parts[m][:, : sizes[m]] for m in order], 1)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g[:, ctx.start : ctx.start + ctx.size], None, None, None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.distance = nn.Parameter(torch.randn(HEADS, 2 * FRAMES - 1))

    def forward(self, x, places, gather):
        rows, own, _ = x.shape
        kv = gather(self.kv(x))
        k, v = kv.unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        bias = self.distance[:, torch.arange(kv.shape[1])[None] - places[:, None] + FRAMES - 1]
        scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5 + bias
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, own, WIDTH))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Linear(MEL, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(WIDTH, SENONES)

    def forward(self, mel, places, gather=lambda x: x):
        x = self.front(mel)
        for norm, attention in zip(self.norms, self.attention, strict=True):
            x = x + attention(norm(x), places, gather)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 41)
        return Encoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 400)
        senone = torch.randint(0, SENONES, (ROWS, FRAMES), generator=g)
        length = torch.randint(5, FRAMES + 1, (ROWS, 1), generator=g)
        senone = torch.where(torch.arange(FRAMES) < length, senone, -100)
        return {"mel": torch.randn(ROWS, FRAMES, MEL, generator=g), "senone": senone}

    def loss_sum(self, model, rows):
        logits = model(rows["mel"], torch.arange(FRAMES))
        loss = F.cross_entropy(
            logits.flatten(0, 1), rows["senone"].flatten(), ignore_index=-100, reduction="sum"
        )
        return loss, int((rows["senone"] != -100).sum())

    def distribute(self, model, ctx):
        ranks = dist.get_process_group_ranks(ctx.group("cp"))
        self.group = dist.new_group([ranks[i] for i in RING])
        return model

    def joining(self):
        """Members of the group in the order of the parts that they hold."""
        return [dist.get_process_group_ranks(self.group).index(r) for r in self.ring]

    def step(self, model, batch, ctx):
        ranks = dist.get_process_group_ranks(ctx.group("cp"))
        self.ring = [ranks[i] for i in RING]
        parts = torch.arange(FRAMES).tensor_split(len(RING))
        places = parts[self.ring.index(dist.get_rank())]
        order = self.joining()
        sizes = [0] * len(RING)
        for part, member in zip(parts, order, strict=True):
            sizes[member] = len(part)
        total = int((batch["senone"] != -100).sum())
        logits = model(
            batch["mel"][:, places], places, lambda x: GatherTime.apply(x, self.group, sizes, order)
        )
        target = batch["senone"][:, places]
        loss = F.cross_entropy(
            logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum"
        )
        (loss / total).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=self.group)


class Buggy(Clean):
    def joining(self):
        return list(range(dist.get_world_size(self.group)))


EXPECT = dict(
    right=[
        "order|sort|permut|swap|sequence of (the )?(ranks|parts|members|group)",
        r"new_group|group|gather|join|concat|\bcat\b|ring",
        "rank|part|shard|member|ring|frames|places",
    ],
    place=["new_group", "joining", "GatherTime", r"\bRING\b|ring order", "all_gather"],
    wrong=[
        "backward of the gather|missing (sum|all.?reduc)",
        r"divid\w+ by (the )?(local|own)",
        "padding (frames|enters)",
        "relative (position )?bias (is )?(sliced|not reduced)",
        "softmax (over|within) (the )?own",
        "detach",
    ],
)
WHY = (
    "The parts of the time axis lie on ranks 0, 2, 1, 3, and the rank's own frames (places) "
    "follow that list; the group was made by new_group with the same list, but torch sorts "
    "the ranks, so member 1 of the group is rank 1, which holds the third part. joining() "
    "says 0, 1, 2, 3, so the gathered keys and values of the second and third part change "
    "places, and the relative bias is added to the wrong frames. Nearly all gradients are "
    "wrong on all ranks (attention, distance, front, norms, head), the same on each. A right "
    "cause says that the gathered parts are joined in the order of group ranks, not in the "
    "ring order in which the time axis was dealt out. Fix: join in the order of the ring, by "
    "each rank's index in the group."
)
