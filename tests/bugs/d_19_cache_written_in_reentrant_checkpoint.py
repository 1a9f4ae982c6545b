"""An encoder fills a key/value cache inside checkpointed layers, a decoder reads it. After FAULTS
C15-06 (transformers PR 46572): in reentrant mode what is written has no graph.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, CONTEXT, CANVAS, WIDTH, VOCABULARY, LAYERS = 10, 5, 3, 8, 14, 2


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.out, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cache_kv = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x, cache, at):
        y = self.norm1(x)
        cache[at] = self.cache_kv(y).chunk(2, dim=-1)
        k, v = self.kv(y).chunk(2, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(self.q(y), k, v))
        return x + self.mlp(F.silu(self.norm2(x)))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.q = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, kv):
        return x + self.out(F.scaled_dot_product_attention(self.q(self.norm(x)), *kv))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(EncoderLayer() for _ in range(LAYERS))
        self.decoder = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, context, canvas, run=None):
        cache, x = {}, self.embed(context)
        for i, layer in enumerate(self.encoder):
            x = layer(x, cache, i) if run is None else run(layer, x, cache, i)
        y = self.embed(canvas) + x.mean(1, keepdim=True)
        for i, layer in enumerate(self.decoder):
            y = layer(y, cache[i])
        return self.head(self.norm(y))


class Clean:
    reentrant = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "context": torch.randint(VOCABULARY, (ROWS, CONTEXT), generator=g),
            "canvas": torch.randint(VOCABULARY, (ROWS, CANVAS), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, CANVAS), generator=g),
        }

    def loss_sum(self, model, rows, run=None):
        logits, labels = model(rows["context"], rows["canvas"], run), rows["labels"].flatten()
        return F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"), labels.numel()

    def step(self, model, batch, ctx):
        def run(layer, *args):
            return checkpoint(layer, *args, use_reentrant=self.reentrant)

        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine, run)
        (loss / (ROWS * CANVAS)).backward()
        for param in model.parameters():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    reentrant = True


EXPECT = dict(
    right=[
        r"cache_kv|encoder|cache",
        r"no gradient|zero|missing|\b0\b|none|detach|graph|backward|lost|cut|without|not (reach|flow|arriv|get)"
        r"|never|stops|absent|recomput|checkpoint",
    ],
    place=[r"encoder", r"cache"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|two times|2 times)|reduced (twice|again)",
        r"averag|mean of (the )?means",
        r"\bforward (is )?wrong|first wrong forward",
        r"rows? .{0,30}(lost|missing|dropped)",
        r"random|\brng\b|dropout",
    ],
)

WHY = (
    "The reentrant checkpoint runs the encoder's forward without a graph, so the cached keys and "
    "values are constants for the decoder: cache_kv gets zero gradient, the rest of the encoder "
    "and the embedding lose the part through the cache. The forward is right."
)
