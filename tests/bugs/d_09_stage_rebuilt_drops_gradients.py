"""torch.distributed.pipelining over windows of unlike sequence length: the stage is set up again for
each. After FAULTS C12-04 (Automodel PR 3530): setting it up again sets param.grad to None.
"""

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2}}}}

ROWS, LENGTH, SHORT, WIDTH, VOCABULARY, MICRO_BATCHES = 12, 7, 4, 8, 13, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)

    def forward(self, x):
        q, k, v = (t.unsqueeze(1) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(3)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(2, SHORT + 1, (ROWS, 1), generator=g)
        lengths[ROWS // 2 :] += LENGTH - SHORT
        labels = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "labels": labels.masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    @staticmethod
    def cross_entropy(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        labels = rows["labels"]
        return self.cross_entropy(model(rows["ids"]), labels), (labels != -100).sum()

    def distribute(self, model, ctx):
        if ctx.coords["pp"] == 0:
            model.norm = model.head = None
            del model.blocks["2"]
        else:
            model.embed = model.position = None
            del model.blocks["0"], model.blocks["1"]
        return model

    def set_up(self, model, ctx, count):
        stage = PipelineStage(
            model, ctx.coords["pp"], ctx.axes["pp"], ctx.device, group=ctx.group("pp")
        )

        def loss(logits, labels):
            return self.cross_entropy(logits, labels) / count

        return ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=loss, scale_grads=False)

    def step(self, model, batch, ctx):
        count = (batch["labels"] != -100).sum()
        half = ROWS // 2
        for rows, length in ((slice(0, half), SHORT), (slice(half, ROWS), LENGTH)):
            schedule = self.set_up(model, ctx, count)
            if ctx.coords["pp"] == 0:
                schedule.step(batch["ids"][rows, :length].contiguous())
            else:
                schedule.step(target=batch["labels"][rows, :length].contiguous())


class Buggy(Clean):
    def set_up(self, model, ctx, count):
        for param in model.parameters():
            param.grad = None
        return super().set_up(model, ctx, count)


EXPECT = dict(
    right=[
        r"rows?|micro.?batch|window|sample|batch|backward|contribut",
        r"lost|missing|dropped|absent|only|last|first|left out|lack|none of|without|do(es)? not"
        r"|overwrit|reset|cleared|half|discard|thrown|gone|nothing|weight 0|\b0\b",
    ],
    place=[r"rows?\b", r"micro.?batch", r"window", r"(every|all|each) (param|rank|stage|gradient)"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|two times|2 times)|reduced (twice|again)",
        r"forward (pass )?(is wrong|differs)",
        r"averag|mean of (the )?means",
        r"(last|second) (half|window|six rows|6 rows) (is|are) (lost|missing|dropped)",
        r"rows? (6|7|8|9|10|11)\b\S* (is|are) (lost|missing|dropped)",
    ],
)

WHY = (
    "The gradients of the first window (rows 0 to 5) are thrown away on both stages when the stage "
    "is set up for the second sequence length; only rows 6 to 11 remain."
)
