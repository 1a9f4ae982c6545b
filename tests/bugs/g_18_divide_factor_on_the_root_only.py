"""FSDP2 with a loss that is divided by the tokens of all ranks, so gradients are to be summed: the author sets the divide factor on the
root. After FAULTS C03-06 (pytorch issue 155903, set_reduce_scatter_divide_factor) and its documentation: the setting holds for
one module and does not reach the wrapped layers below.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WORDS, WIDTH, LABELS, MICRO_BATCHES = 14, 6, 25, 10, 5, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.ffn = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        q, k, v = (
            t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + F.relu(self.ffn(x))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LABELS)

    def forward(self, ids, mask):
        x = self.words(ids) + self.places.weight
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Encoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
            "mask": torch.arange(LENGTH) < lengths,
            "labels": torch.randint(LABELS, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], rows["mask"])
        each = F.cross_entropy(logits.mT, rows["labels"], reduction="none")
        return (each * rows["mask"]).sum(), rows["mask"].sum()

    def summed(self, model):
        return [*model.layers, model]

    def distribute(self, model, ctx):
        for part in (*model.layers, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
        for part in self.summed(model):
            part.set_gradient_divide_factor(1.0)
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        tokens = mine["mask"].sum()
        dist.all_reduce(tokens)
        for i in range(MICRO_BATCHES):
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            (self.loss_sum(model, micro)[0] / tokens).backward()


class Buggy(Clean):
    def summed(self, model):
        return [model]


EXPECT = dict(
    right=[
        r"layers",
        r"1/3|0\.33\d*|world.?size|number of ranks|averag\w*|divided|mean|third|too small|\b3\b|factor",
    ],
    place=[r"layers", r"layers\.[01]"],
    wrong=[
        r"(words|places|head)\S* (is|are|was|were) (wrong|too small|divided|averaged)",
        r"(never|not) (been )?(all.?)?(reduced|scattered)",
        r"(counted|reduced|summed) (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (wrong|different)",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
        r"(all|every) parameters? (is|are) (wrong|too small|divided)",
    ],
)
WHY = (
    "Only the root sums; layers.0 and layers.1 are FSDP modules of their own that still divide by the 3 ranks, so all gradients of "
    "layers.* are 1/3 of the right ones, on all ranks and for both micro-batches. words, places, norm and head belong to the root and "
    "are right."
)
