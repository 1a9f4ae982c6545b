"""A decoder whose upper layers reuse the keys and values of layer 1, with activation checkpointing.
After FAULTS C15-06 (transformers PR 46572): what a reentrant checkpoint writes to a cache has no graph."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, LENGTH, VOCAB, WIDTH, LAYERS, SHARED_FROM = 7, 5, 12, 8, 4, 2


class Layer(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index = index
        self.norm, self.q_proj = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        if index < SHARED_FROM:
            self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)
            self.v_proj = nn.Linear(WIDTH, WIDTH)
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 13), nn.SiLU(), nn.Linear(13, WIDTH)
        )

    def forward(self, x, cache):
        y = self.norm(x)
        if self.index < SHARED_FROM:
            k, v = self.k_proj(y), self.v_proj(y)
            cache[self.index] = k, v
        else:
            k, v = cache[SHARED_FROM - 1]
        x = x + self.o_proj(F.scaled_dot_product_attention(self.q_proj(y), k, v, is_causal=True))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(i) for i in range(LAYERS))
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids, **checkpointing):
        x, cache = self.embed_tokens(ids), {}
        for layer in self.layers:
            if checkpointing:
                x = checkpoint(layer, x, cache, **checkpointing)
            else:
                x = layer(x, cache)
        return self.lm_head(self.norm(x))


class Clean:
    use_reentrant = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss_sum(self, model, rows, **checkpointing):
        logits = model(rows["ids"], **checkpointing).flatten(0, 1)
        labels = rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine, use_reentrant=self.use_reentrant)
        (loss / batch["labels"].numel()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    use_reentrant = True


EXPECT = dict(
    right=[
        r"layers\.[123]|k_proj|v_proj|keys?|values?|cache",
        (
            r"backward|graph|detach|checkpoint|recomput|reentrant|missing|lost|lacks?|partial|no gradient"
            r"|gradient.{0,60}(not|never|no|stop|cut|end|miss)|(not|never|no|stop|cut|end|miss).{0,60}gradient|requires.?grad"
        ),
    ],
    place=[r"layers\.1", r"k_proj|v_proj", r"layers\.[23]"],
    wrong=[
        r"gradients? of \S*(weight|bias)\S* (is|are|was) (not|never) (all-)?reduced|missing (all.?)?reduc|no all.?reduce",
        r"(reduced|counted|divided) (twice|again)",
        r"mean of (the )?means",
        r"(lm_head|layers\.[23])\S* (is|are) wrong",
        r"forward (is|was) wrong|wrong forward|output (is|was) wrong",
        r"rows? (is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "Layer 1 writes its keys and values to the cache inside a reentrant checkpoint, that is without a graph, so the "
    "gradient of layers 2 and 3 with respect to them is lost: k_proj, v_proj, norm of layer 1 and all before are wrong."
)
