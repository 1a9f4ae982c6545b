"""Reduction of a ZeRO-2 bucket with mixture-of-experts parameters in the style of DeepSpeed (`average_tensor` in stage_1_and_2.py): the gradients lie in one bucket in the order of readiness, each piece goes to the rank that owns its partition, neighbouring
pieces for the same partition are joined to one reduction. Dense parameters have four partitions (all ranks), experts two (their data-parallel pair). DeepSpeed issue 3521: joining looks at the partition number only, not at the process group.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"edp": 2, "ep": 2}}}}
VOCABULARY, LENGTH, WIDTH, INNER, EXPERTS, TOP, ROWS, MICRO = 13, 5, 8, 7, 4, 2, 14, 2


def gathered(x, counts, group):
    pad = x.new_zeros(max(counts), *x.shape[1:])
    pad[: len(x)] = x
    pieces = [torch.empty_like(pad) for _ in counts]
    dist.all_gather(pieces, pad, group=group)
    return torch.cat([p[:n] for p, n in zip(pieces, counts, strict=True)])


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, counts, group):
        rank = dist.get_rank(group)
        ctx.group, ctx.at = group, (sum(counts[:rank]), sum(counts[: rank + 1]))
        return gathered(x, counts, group)

    @staticmethod
    def backward(ctx, g):
        g = g.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(g, group=ctx.group)
        return g[slice(*ctx.at)], None, None


class SumToOwners(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, counts, group):
        ctx.counts, ctx.group, rank = counts, group, dist.get_rank(group)
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x[sum(counts[:rank]) : sum(counts[: rank + 1])].clone()

    @staticmethod
    def backward(ctx, g):
        return gathered(g, ctx.counts, ctx.group), None, None


def local(p):
    return p.to_local() if isinstance(p, DTensor) else p


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / WIDTH**0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / INNER**0.5)
        self.group = None

    def forward(self, x):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        h = self.norm(x + past).flatten(0, 1)
        weight, chosen = self.router(h).softmax(-1).topk(TOP)
        gates = torch.zeros(len(h), EXPERTS, dtype=h.dtype).scatter(1, chosen, weight)
        if self.group is not None:
            rank, n = dist.get_rank(self.group), dist.get_world_size(self.group)
            counts = [torch.zeros(1, dtype=torch.long) for _ in range(n)]
            dist.all_gather(counts, torch.tensor([len(h)]), group=self.group)
            counts = [int(c) for c in counts]
            h, gates = (GatherTokens.apply(t, counts, self.group) for t in (h, gates))
            gates = gates.tensor_split(n, 1)[rank]
        y = F.silu(torch.einsum("th,ehf->tef", h, local(self.w1)))
        y = torch.einsum("tef,efh,te->th", y, local(self.w2), gates)
        if self.group is not None:
            y = SumToOwners.apply(y, counts, self.group)
        return x + y.view_as(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Bucket:
    """All gradients of this rank, in the order in which the backward makes them ready."""

    def __init__(self, model, ctx, joined):
        self.joined = joined
        self.groups = {"dense": ctx.group("edp", "ep"), "expert": ctx.group("edp")}
        self.params = [
            (p, "expert" if isinstance(p, DTensor) else "dense") for p in model.parameters()
        ]
        self.pieces = {}  # parameter -> [(partition, elements)]
        for kind, group in self.groups.items():
            own = [p for p, k in self.params if k == kind]
            n = dist.get_world_size(group)
            size = -(-sum(local(p).numel() for p in own) // n)
            at = 0
            for p in own:
                todo, self.pieces[p] = local(p).numel(), []
                while todo:
                    part = min(todo, size - at % size)
                    self.pieces[p].append((at // size, part))
                    at, todo = at + part, todo - part

    def reduce(self):
        ready = self.params[::-1]
        flat = torch.cat([local(p.grad).flatten() for p, _ in ready])
        ranges, at, before = [], 0, None
        for p, kind in ready:
            for partition, n in self.pieces[p]:
                if before is not None and self.joined(before, (partition, kind)):
                    ranges[-1][2] += n
                else:
                    ranges.append([partition, at, n, kind])
                before, at = (partition, kind), at + n
        for partition, start, n, kind in ranges:
            group, piece = self.groups[kind], flat[start : start + n]
            total = piece.clone()
            dist.all_reduce(total, group=group)
            if dist.get_rank(group) == partition:  # the owner alone keeps the sum
                piece.copy_(total)
        at = 0
        for p, kind in ready:  # what the owners hold, for everybody
            start, group = at, self.groups[kind]
            for partition, n in self.pieces[p]:
                piece = flat[at : at + n].clone()
                dist.broadcast(piece, dist.get_global_rank(group, partition), group=group)
                flat[at : at + n] = piece
                at += n
            local(p.grad).copy_(flat[start:at].view_as(local(p.grad)))


class Clean:
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

    def loss_sum(self, model, rows):
        loss = F.cross_entropy(
            model(rows["ids"]).flatten(0, 1), rows["labels"].flatten(), reduction="sum"
        )
        return loss, rows["labels"].numel()

    def distribute(self, model, ctx):
        for layer in model.layers:
            layer.group = ctx.group("ep")
            for name in ("w1", "w2"):
                whole = getattr(layer, name).data
                setattr(
                    layer,
                    name,
                    nn.Parameter(distribute_tensor(whole, ctx.mesh, [Replicate(), Shard(0)])),
                )
        return model

    @staticmethod
    def joined(before, now):
        return before == now

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for m in range(MICRO):
            part = {k: v.tensor_split(MICRO)[m] for k, v in mine.items()}
            (self.loss_sum(model, part)[0] / batch["labels"].numel()).backward()
        with torch.no_grad():
            Bucket(model, ctx, self.joined).reduce()


class Buggy(Clean):
    @staticmethod
    def joined(before, now):
        return before[0] == now[0]


EXPECT = dict(
    right=[
        r"(?i)embed",
        r"(?i)layers\.1\.w2|expert|w2",
        r"(?i)reduc|sum|group|contribution|missing|lack|only|ranks? |bucket|range|owner",
        r"(?i)missing|lack|without|only|not (summed|reduced|added)|wrong group|other group|(ranks? )?0 (and|,|\+) ?2|ranks? 1 (and|,) ?3|own|half|partial|never|too few",
    ],
    place=[r"(?i)embed|layers\.1\.w2|average_tensor|bucket|joined|range"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(head|layers\.0\.w[12]|layers\.2\.\w+|router|norm)\S* (is|are) wrong",
        r"(?i)divi(ded|des) by|divisor|reduced (twice|again)|counted twice|too large",
        r"(?i)all experts (are|get)|every expert (is|gets)",
        r"(?i)micro.?batch(es)? .{0,25}(lost|missing|dropped)",
        r"(?i)backward of \S+ is wrong|(gates?|routing) (is|are) wrong",
    ],
)
WHY = (
    "Neighbouring pieces of the bucket are joined to one reduction when their partition NUMBER agrees, though dense partitions live on the group of all four ranks and expert partitions on the pairs (0,2) and (1,3). The joined range is reduced over the group of its first piece. Two joins happen. "
    "(1) layers.0.w1 (experts, partition 0) followed by the first 99 of the 104 elements of embed.weight (dense, partition 0): summed over the expert pair only; the dense owner, rank 0, has ranks 0 + 2, so that all ranks get an embed.weight gradient (rows 0 to 11 and three columns of row 12) without the contributions of ranks 1 and 3; the last five elements of row 12 are right. "
    "(2) the dense pieces of layer 1 up to layers.1.norm.weight (partition 1), followed by layers.1.w2 (experts, partition 1): summed over all four ranks and kept by global rank 1 only; the owners of the expert partition 1 are ranks 2 and 3, which keep their own local gradient. layers.1.w2 of all ranks therefore lacks the sum over edp: experts 0, 1 (ranks 0 and 2) have rank 2's part only, experts 2, 3 (ranks 1 and 3) rank 3's part only. "
    "Everything else (all other experts, router, norms, head) is right, as are forward, loss and the local gradients. Fix: join only if the process group agrees too."
)
