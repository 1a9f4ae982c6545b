"""Interleaved 1F1B of torch.distributed.pipelining, two chunks on each of two ranks. After torchtitan's and Megatron-LM's virtual pipelines
(which layers belong to virtual stage v of rank r; FAULTS C16's family): each rank takes two neighbouring chunks of the model, as without
interleaving, and runs them as stages r and r + 2.
"""

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2}}}}
ROWS, LENGTH, WORDS, WIDTH, CHUNKS, MICRO_BATCHES = 12, 5, 15, 8, 4, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, groups=2)
        self.up, self.down = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)

    def forward(self, x):
        y = F.pad(self.norm1(x).mT, (2, 0))
        x = x + torch.tanh(self.mix(y)).mT
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Chunk(nn.Module):
    def __init__(self, i):
        super().__init__()
        if i == 0:
            self.words = nn.Embedding(WORDS, WIDTH)
        self.block = Block()
        if i == CHUNKS - 1:
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        x = self.block(self.words(x) if hasattr(self, "words") else x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.chunks = nn.ModuleDict({str(i): Chunk(i) for i in range(CHUNKS)})

    def forward(self, x):
        for chunk in self.chunks.values():
            x = chunk(x)
        return x


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        words = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        labels = words[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100)
        return {"words": words[:, :-1].contiguous(), "labels": labels}

    @staticmethod
    def word_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.word_loss(model(rows["words"]), rows["labels"]), (rows["labels"] != -100).sum()

    def chunks_of(self, rank, ranks):
        return range(rank, CHUNKS, ranks)

    def distribute(self, model, ctx):
        rank, ranks = ctx.coords["pp"], ctx.axes["pp"]
        kept = self.chunks_of(rank, ranks)
        for i in set(range(CHUNKS)) - set(kept):
            del model.chunks[str(i)]
        self.stages = [
            PipelineStage(
                model.chunks[str(chunk)], stage, CHUNKS, ctx.device, group=ctx.group("pp")
            )
            for chunk, stage in zip(kept, range(rank, CHUNKS, ranks))
        ]
        return model

    def step(self, model, batch, ctx):
        count = (batch["labels"] != -100).sum()
        schedule = ScheduleInterleaved1F1B(
            self.stages,
            MICRO_BATCHES,
            loss_fn=lambda out, labels: self.word_loss(out, labels) / count,
            scale_grads=False,
        )
        first, last = ctx.coords["pp"] == 0, ctx.coords["pp"] == ctx.axes["pp"] - 1
        schedule.step(
            *([batch["words"]] if first else []), **({"target": batch["labels"]} if last else {})
        )


class Buggy(Clean):
    def chunks_of(self, rank, ranks):
        held = CHUNKS // ranks
        return range(rank * held, (rank + 1) * held)


EXPECT = dict(
    right=[
        r"chunks\.[123]|stage|chunk|layer",
        r"order|forward|output|activation|input of|permut|swap|wrong (place|rank|input|stage|chunk)|holds|assign",
    ],
    place=[r"chunks\.[12]", r"stage|chunk", r"(all|every|each|both) ranks?|ranks? \W?[01]"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"forward (pass )?(is|was) (right|exact|correct)$",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped|mixed)",
        r"mean of (the )?(rank |ranks' )?means",
        r"(output|forward) of chunks\.0\S* (is|was) wrong",
    ],
)
WHY = (
    "Rank 0 holds chunks 0 and 1 and runs them as stages 0 and 2, rank 1 holds chunks 2 and 3 and runs them as stages 1 and 3: the "
    "data pass through the chunks in the order 0, 2, 1, 3. The forward is "
    "wrong from the second stage on, where chunk 2 gets the output of chunk 0; all gradients are those of another model."
)
