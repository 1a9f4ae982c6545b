"""ZeRO-like buckets by hand with a predivide factor: gradients are divided before the all-reduce and rescaled after it; a parameter larger than a bucket goes alone.
After DeepSpeed's `gradient_predivide_factor` and its path for extra large parameters.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WIDTH, VOCAB, MICRO = 14, 4, 12, 31, 2
BUCKET, PREDIVIDE = 300, 2.0


class Layer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, hidden),
            nn.Linear(hidden, WIDTH),
        )

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Linear(LENGTH, LENGTH, bias=False)
        self.layers = nn.ModuleList(Layer(n) for n in (17, 29))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 6)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class Reducer:
    """Averages over the group, bucket by bucket."""

    def __init__(self, group):
        self.group, self.world = group, dist.get_world_size(group)
        self.waiting, self.held = [], 0

    def predivided_sum(self, flat):
        flat /= PREDIVIDE
        dist.all_reduce(flat, group=self.group)
        return flat

    def flush(self):
        if not self.waiting:
            return
        flat = self.predivided_sum(torch.cat([p.grad.flatten() for p in self.waiting]))
        flat *= PREDIVIDE / self.world
        for p, piece in zip(
            self.waiting, flat.split([p.numel() for p in self.waiting]), strict=True
        ):
            p.grad.copy_(piece.view_as(p))
        self.waiting, self.held = [], 0

    def large(self, p):
        self.predivided_sum(p.grad)
        p.grad *= PREDIVIDE / self.world

    def add(self, p):
        if p.numel() > BUCKET:
            return self.large(p)
        if self.held + p.numel() > BUCKET:
            self.flush()
        self.waiting.append(p)
        self.held += p.numel()


class ShortReducer(Reducer):
    def large(self, p):
        self.predivided_sum(p.grad)


class Clean:
    reducer = Reducer

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "tokens": torch.randint(VOCAB, (ROWS, LENGTH), generator=g),
            "y": torch.randint(6, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["tokens"]), rows["y"], reduction="sum"), len(rows["y"])

    def step(self, model, batch, ctx):
        mine = {
            k: v.tensor_split(ctx.world_size)[ctx.rank].tensor_split(MICRO)
            for k, v in batch.items()
        }
        for tokens, y in zip(mine["tokens"], mine["y"], strict=True):
            loss, _ = self.loss_sum(model, {"tokens": tokens, "y": y})
            (loss * ctx.world_size / ROWS).backward()
        reducer = self.reducer(ctx.group("dp"))
        for p in reversed(list(model.parameters())):
            reducer.add(p)
        reducer.flush()


class Buggy(Clean):
    reducer = ShortReducer


EXPECT = dict(
    right=[
        r"embed|layers\.1|up\.weight|down\.weight",
        r"3/2|1\.5|factor|times|divid|scale|averag|predivide",
    ],
    place=[r"embed|layers\.1|large|predivided|reduce"],
    wrong=[
        r"forward (is|goes|was) wrong|goes wrong in the forward",
        r"(is|are|was|were) (never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"do(es)? not read every row once|rows? .{0,20}(never|twice) read",
        r"(layers\.0|head|mix)\S* (is|are) wrong",
        r"backward of \S*(embed|mix|layers|norm|head)\S* is wrong",
        r"(reduced|summed) (twice|again)",
        r"micro.?batch\w* .{0,30}(lost|twice|only)",
    ],
)
WHY = (
    "Parameters larger than a bucket (embed.weight with 372 elements, layers.1.up.weight and layers.1.down.weight with 348) are divided by the predivide factor 2 and summed "
    "over the three ranks, but the rescaling by 2/3 afterwards is missing on this path: they end 3/2 times too large on all ranks, all else is right. Forward, "
    "backward, rows and the sum itself are right. Right: multiplied by PREDIVIDE / world after the sum, as the buckets are."
)
