"""Adding domain tokens to a trained vocabulary: only the new embedding rows (and the classifier) learn, with the table cut over tensor
ranks. Modelled on the requests for partially trainable embeddings (PEFT `trainable_token_indices` with tensor parallelism, Megatron's
resized vocabularies): the old rows are masked by their number within the shard.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F

TOPOLOGY = {"pools": {"tune": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, LENGTH, VOCAB, OLD, WIDTH, CLASSES = 9, 6, 14, 5, 6, 3


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.body, self.norm, self.head = (
            nn.Linear(WIDTH, 9),
            nn.LayerNorm(9),
            nn.Linear(9, CLASSES),
        )

    def classify(self, x):
        return self.head(self.norm(F.gelu(self.body(x))).mean(1))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Tagger()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH), generator=g)
        tokens[:, 0] = torch.arange(ROWS) % (VOCAB - OLD) + OLD
        return {"tokens": tokens, "y": torch.randint(CLASSES, (ROWS,), generator=g)}

    def loss_sum(self, model, rows):
        table = model.embed.weight
        table = torch.where((torch.arange(VOCAB) >= OLD)[:, None], table, table.detach())
        logits = model.classify(F.embedding(rows["tokens"], table))
        return F.cross_entropy(logits, rows["y"], reduction="sum"), len(rows["y"])

    def distribute(self, model, ctx):
        weight = distribute_tensor(model.embed.weight.data, ctx.mesh, [Replicate(), Shard(0)])
        model.embed.weight = nn.Parameter(weight)
        return model

    def is_new(self, rows, first):
        return first + torch.arange(rows) >= OLD

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        table = model.embed.weight.to_local()
        first = ctx.coords["tp"] * (VOCAB // ctx.axes["tp"])
        table = torch.where(self.is_new(len(table), first)[:, None], table, table.detach())
        place = mine["tokens"] - first
        held = (place >= 0) & (place < len(table))
        x = F.embedding(place.clamp(0, len(table) - 1), table) * held[..., None]
        logits = model.classify(Sum.apply(x, ctx.group("tp")))
        (F.cross_entropy(logits, mine["y"], reduction="sum") / ROWS).backward()
        with torch.no_grad():
            for param in model.parameters():
                grad = param.grad._local_tensor if param is model.embed.weight else param.grad
                dist.all_reduce(grad, group=ctx.group("dp"))


class Buggy(Clean):
    def is_new(self, rows, first):
        return torch.arange(rows) >= OLD


EXPECT = dict(
    right=[
        r"embed",
        r"zero|missing|lack|lost|no gradient|drop|absent|\b0\b|without|incomplete|never receive|mask",
        r"rows?|shard|tp|rank \W?[13]|ranks \W?1|index|slice|part|elements|entries|tokens?",
    ],
    place=[r"embed", r"ranks? \W?[13]", r"rows? .{0,20}\d|shard"],
    wrong=[
        r"(body|norm|head)\S* (is|are|has|have) (a )?wrong",
        r"(never|not) (been )?(all.?)?(reduced|summed|averaged)",
        r"forward (pass )?(is|was) wrong",
        r"(reduced|counted|summed) (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"ranks? \W?0\b[^.]{0,40}(is|are|has|have|holds?) (a )?(wrong|zero|no gradient)",
    ],
)
WHY = (
    "The mask of new rows compares the row number within the shard with OLD: on tensor rank 1 (ranks 1 and 3) the global rows 7 to 11 "
    "of embed.weight are taken for old ones and get a zero gradient; rows 12 and 13, the shard of tensor rank 0, and everything else "
    "are right. The forward is right."
)
