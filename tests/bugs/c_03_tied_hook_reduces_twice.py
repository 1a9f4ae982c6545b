"""Data parallelism by a hook on every parameter that sums its gradient as soon as it is there.
After FAULTS C11-09 (DeepSpeed PR 7534): the reduce hook of a tied parameter fires once per layer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH = 10, 5, 13, 8


class Mixer(nn.Module):
    """Token mixing by a causal depthwise convolution, channel mixing by a gated MLP."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)
        self.gate, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.conv(F.pad(self.norm(x).transpose(1, 2), (2, 0))).transpose(1, 2)
        a, b = self.gate(y).chunk(2, dim=-1)
        return x + self.down(F.silu(a) * b)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Mixer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        nn.init.normal_(self.lm_head.weight, std=0.5)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss_sum(self, model, rows):
        logits, labels = model(rows["ids"]).flatten(0, 1), rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()

    def parameters_to_hook(self, model):
        return list(model.parameters())

    def distribute(self, model, ctx):
        def reduce(param):
            dist.all_reduce(param.grad, group=ctx.group("dp"))

        for param in self.parameters_to_hook(model):
            param.register_post_accumulate_grad_hook(reduce)
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / batch["labels"].numel()).backward()


class Buggy(Clean):
    def parameters_to_hook(self, model):
        # layer by layer, so that the hooks can be told apart in the trace
        return [p for module in model.modules() for p in module.parameters(recurse=False)]


EXPECT = dict(
    right=[
        r"embed|lm_head|tied|shared",
        r"twice|again|two times|2 times|repeated|more than once|x ?3|3 ?x|3(\.0+)? times|\b3\.0|factor"
        r"|too (large|big)|over.?counted|second|times the",
    ],
    place=[r"embed_tokens", r"lm_head", r"tied|shared"],
    wrong=[
        r"(not|never) (all-)?reduced|missing (all.?)?reduc",
        r"every (parameter|gradient) is (wrong|too|3)",
        r"averag\w* instead",
        r"rows? (is|are|was|were) (lost|missing|dropped)",
        r"forward (is|are) wrong",
    ],
)
WHY = (
    "The tied embedding/head weight gets the reduce hook once for each of its two layers, so its "
    "gradient is summed over dp and then the sum is summed again: 3 times too large, all else right."
)
