"""GPT-NeoX layers of transformers in two stages of torch.distributed.pipelining (1F1B, three micro-batches), data parallelism of two, input
and output embedding tied. After torchtitan and pytorch issues on tied weights in pipelining: each stage has its own copy, whose gradients
must be added.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F
from transformers import GPTNeoXConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer, GPTNeoXRotaryEmbedding

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 2}}}}
ROWS, LENGTH, VOCABULARY, WIDTH, LAYERS, MICRO = 12, 7, 29, 16, 3, 3


class NeoX(nn.Module):
    def __init__(self):
        super().__init__()
        config = GPTNeoXConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            intermediate_size=27,
            max_position_embeddings=16,
            use_cache=False,
        )
        config._attn_implementation = "sdpa"
        self.embed_in = nn.Embedding(VOCABULARY, WIDTH)
        self.rotary = GPTNeoXRotaryEmbedding(config)
        self.layers = nn.ModuleDict({str(i): GPTNeoXLayer(config, i) for i in range(LAYERS)})
        self.final_layer_norm = nn.LayerNorm(WIDTH)
        self.embed_out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embed_in.weight, std=0.5)
        self.embed_out.weight = self.embed_in.weight

    def forward(self, x):
        if self.embed_in is not None:
            x = self.embed_in(x)
        positions = self.rotary(x, torch.arange(x.shape[1])[None])
        for layer in self.layers.values():
            x = layer(x, position_embeddings=positions)
        if self.embed_out is not None:
            x = self.embed_out(self.final_layer_norm(x))
        return x


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return NeoX()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        labels = rows["labels"]
        return self.token_loss(model(rows["ids"]), labels), (labels != -100).sum()

    def distribute(self, model, ctx):
        first = ctx.coords["pp"] == 0
        model.embed_out.weight = nn.Parameter(model.embed_in.weight.detach().clone())
        for i in range(LAYERS):
            if (i < 2) != first:
                del model.layers[str(i)]
        if first:
            model.final_layer_norm = model.embed_out = None
        else:
            model.embed_in = None
        stage = PipelineStage(
            model, ctx.coords["pp"], 2, torch.device("cpu"), group=ctx.group("pp")
        )
        self.schedule = Schedule1F1B(
            stage,
            n_microbatches=MICRO,
            loss_fn=lambda logits, labels: self.token_loss(logits, labels) / self.total,
            scale_grads=False,
        )
        return model

    def reduce_tied(self, model, ctx):
        tied = model.embed_out if model.embed_in is None else model.embed_in
        dist.all_reduce(tied.weight.grad, group=ctx.group("pp"))

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        self.total = (batch["labels"] != -100).sum()
        if ctx.coords["pp"] == 0:
            self.schedule.step(mine["ids"])
        else:
            self.schedule.step(target=mine["labels"], losses=[])
        self.reduce_tied(model, ctx)
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def reduce_tied(self, model, ctx):
        pass


EXPECT = dict(
    right=[
        r"tied|shared|both (stages|copies|uses)|two (stages|copies|uses)|\bpp\b|pipeline|stage",
        r"(not|never|n't|no|missing|without|lacks?|un|skip\w*|omit\w*)[ -]?.{0,50}(reduc|summed|sum\b|added|combin|synchron)|partial|"
        r"(own|local|only|one) .{0,20}(part|share|use|contribution|gradient|copy|stage)|differ",
    ],
    place=[r"embed_in", r"embed_out", r"embedding"],
    wrong=[
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"mean of (the )?means",
        r"(own|local|wrong) (count|denominator|divisor)",
        r"(not|never) (been )?(all.?)?(reduced|summed) (over|across|in|along) (the )?\W?(dp|data)",
        r"(layers\.\S*|final_layer_norm\S*) (is|are|has|have|was|were) (a )?(wrong|missing|partial)",
        r"micro.?batch\w* (is|was|are) (missing|dropped|lost)",
    ],
)
WHY = (
    "The tied weight lives twice, as embed_in.weight on the first stage and embed_out.weight on the last, and the two gradients are not "
    "summed over pp: each stage holds only the part of its own use (lookup or output). The two differ; their sum is right. All other gradients are right."
)
