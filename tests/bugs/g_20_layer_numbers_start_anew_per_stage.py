"""A decoder with sliding-window layers and, every third, a layer that sees everything, in three stages of torch.distributed.pipelining
(GPipe). After reports on layer patterns under pipeline parallelism (Gemma 2/3 windows, Llama 4 NoPE layers; Megatron's layer_number and
transformer layer offset): a stage counts its layers from zero, so the pattern starts anew.
"""

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH, LAYERS, WINDOW, MICRO_BATCHES = 6, 8, 20, 6, 5, 2, 3
STAGES = [0, 1], [2, 3], [4]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH)
        )

    def forward(self, x, number):
        place = torch.arange(x.shape[1])
        behind = place[:, None] - place
        window = LENGTH if number % 3 == 2 else WINDOW
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, attn_mask=(behind >= 0) & (behind < window))
        )
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(LAYERS)})
        self.head = nn.Linear(WIDTH, VOCAB)
        self.first_number = 0

    def forward(self, x):
        if self.tokens is not None:
            x = self.tokens(x)
        for number, layer in enumerate(self.layers.values(), self.first_number):
            x = layer(x, number)
        return x if self.head is None else self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        prompt = torch.randint(0, LENGTH, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1].contiguous(),
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) < prompt, -100),
        }

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.token_loss(model(rows["ids"]), rows["labels"]), (rows["labels"] != -100).sum()

    def first_number(self, stage):
        return STAGES[stage][0]

    def distribute(self, model, ctx):
        for i in range(LAYERS):
            if i not in STAGES[ctx.rank]:
                del model.layers[str(i)]
        if ctx.rank > 0:
            model.tokens = None
        if ctx.rank < 2:
            model.head = None
        model.first_number = self.first_number(ctx.rank)
        return model

    def step(self, model, batch, ctx):
        count = (batch["labels"] != -100).sum()
        stage = PipelineStage(model, ctx.rank, 3, ctx.device, group=ctx.group("pp"))
        schedule = ScheduleGPipe(
            stage,
            MICRO_BATCHES,
            lambda logits, labels: self.token_loss(logits, labels) / count,
            scale_grads=False,
        )
        if ctx.rank == 0:
            schedule.step(batch["ids"])
        elif ctx.rank == 2:
            schedule.step(target=batch["labels"])
        else:
            schedule.step()


class Buggy(Clean):
    def first_number(self, stage):
        return 0


EXPECT = dict(
    right=[
        r"layers\.2|rank \W?1|stage \W?1|second stage|middle stage",
        r"forward|output|activation|value|differ\w*|window|mask|attention|pattern",
    ],
    place=[r"layers\.2", r"ranks? \W?1\b", r"(second|middle) stage|stage \W?1"],
    wrong=[
        r"forward (pass )?(is|was) (right|exact|correct)$",
        r"(output|forward) of (the )?(tokens|layers\.[01])\S* (is|was) wrong|first wrong .{0,20}(tokens|layers\.[0134]|head)",
        r"never (been )?(all.?)?reduced|not (all.?)?reduced",
        r"(counted|reduced|summed) (twice|again)",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
        r"mean of (the )?(rank |ranks' )?means",
        r"(gradient|backward) .{0,30}(not sent|dropped|lost)",
    ],
)
WHY = (
    "Layer 2 should see everything (2 % 3 == 2), but its stage (rank 1) counts it as layer 0 and gives it the window; layers 3 and 4 "
    "get a window either way. The forward is wrong from layers.2's attention on, and with it all gradients on all ranks, also those of "
    "the earlier, right stage."
)
