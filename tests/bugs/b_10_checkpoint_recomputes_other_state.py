"""A long sequence goes through checkpointed layers in segments; a module attribute holds the start.
After FAULTS C15-07 (transformers cache under checkpointing): recompute sees a later state."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, LENGTH, WIDTH, VOCAB, SEGMENT = 7, 9, 8, 15, 3


class Attention(nn.Module):
    """Attention within a segment; positions count on from segment to segment."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.3)
        self.seen = 0

    def forward(self, x, seen=None):
        seen = self.seen if seen is None else seen
        x = x + self.table[seen : seen + x.shape[1]]
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / WIDTH**0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return self.out(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention()

    def forward(self, x, seen=None):
        return x + self.attn(self.norm(x), seen)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.stateful = False

    def forward(self, ids):
        done = []
        for start in range(0, ids.shape[1], SEGMENT):
            x = self.embed(ids[:, start : start + SEGMENT])
            for layer in self.layers:
                layer.attn.seen = start
                arguments = (x,) if self.stateful else (x, start)
                x = checkpoint(layer, *arguments, use_reentrant=False)
            done.append(x)
        return self.head(self.norm(torch.cat(done, dim=1)))


class Clean:
    stateful = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=g)
        valid = torch.arange(LENGTH) < lengths
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(~valid, -100)}

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.token_loss(model(rows["ids"]), rows["labels"]), (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        model.stateful = self.stateful
        return DistributedDataParallel(model)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss = self.token_loss(model(mine["ids"]), mine["labels"])
        count = (mine["labels"] != -100).sum()
        dist.all_reduce(count)
        (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    stateful = True


EXPECT = dict(
    right=[r"backward|recomput|checkpoint", r"layers|attn|attention|table"],
    place=[r"layers\.[01]", r"attn", r"table"],
    wrong=[r"averag", r"counted twice", r"never reduced|not reduced|missing reduction"],
)
WHY = (
    "The layers read the segment's start from an attribute, which is the last segment's when the "
    "checkpoint recomputes: forward right, backward of layers.0/1.attn with wrong activations."
)
