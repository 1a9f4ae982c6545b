"""A translation Trainer with label smoothing: DDP, two accumulated micro-batches of variable length.
After FAULTS C02-05 (transformers issue 46731: LabelSmoother ignores num_items_in_batch)."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH = 13, 6, 17, 9
GRADIENT_ACCUMULATION_STEPS, EPSILON = 2, 0.1


class Translator(nn.Module):
    """A GRU encoder over the source, a GRU decoder that attends to it."""

    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.decoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.query, self.mix = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB)

    def forward(self, source, target):
        memory, last = self.encoder(self.source(source))
        x, _ = self.decoder(self.target(target), last)
        scores = self.query(x) @ memory.transpose(1, 2) / WIDTH**0.5
        x = torch.cat([x, scores.softmax(-1) @ memory], dim=-1)
        return self.lm_head(torch.tanh(self.mix(x)))


class LabelSmoother:
    """Smoothed cross entropy; divided by num_items where given, else by the active labels."""

    def __call__(self, logits, labels, num_items=None):
        log_probs = -logits.log_softmax(-1)
        padding = labels.eq(-100)
        nll = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        smooth = log_probs.mean(-1)
        loss = (1 - EPSILON) * nll + EPSILON * smooth
        total = loss.masked_fill(padding, 0.0).sum()
        return total / (num_items if num_items is not None else (~padding).sum())


class Clean:
    label_smoother = LabelSmoother()
    model_accepts_loss_kwargs = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Translator()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=g)
        padding = torch.arange(LENGTH) >= lengths
        return {
            "source": torch.randint(VOCAB, (ROWS, LENGTH - 1), generator=g),
            "target": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(padding, -100),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["source"], rows["target"])
        return LabelSmoother()(logits, rows["labels"], 1), (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        num_items = (mine["labels"] != -100).sum()
        dist.all_reduce(num_items)
        for i in range(GRADIENT_ACCUMULATION_STEPS):
            last = i == GRADIENT_ACCUMULATION_STEPS - 1
            inputs = {k: v.tensor_split(GRADIENT_ACCUMULATION_STEPS)[i] for k, v in mine.items()}
            with contextlib.nullcontext() if last else model.no_sync():
                self.training_step(model, inputs, num_items, ctx)

    def training_step(self, model, inputs, num_items, ctx):
        loss = self.compute_loss(model, inputs, num_items, ctx)
        if not self.model_accepts_loss_kwargs:
            loss = loss / GRADIENT_ACCUMULATION_STEPS
        loss.backward()

    def compute_loss(self, model, inputs, num_items, ctx):
        logits = model(inputs["source"], inputs["target"])
        return self.label_smoother(logits, inputs["labels"], num_items) * ctx.world_size


class Buggy(Clean):
    def compute_loss(self, model, inputs, num_items, ctx):
        logits = model(inputs["source"], inputs["target"])
        return self.label_smoother(logits, inputs["labels"])


EXPECT = dict(
    right=[
        (
            r"mean of (the )?means|(own|local) (count|denominator|number|divisor|mean|token|label|"
            r"normali[sz]er)|micro.?batch.{0,80}(count|mean|own|divi|normali[sz])"
            r"|(count|number|divisor|divided|normali[sz]ed).{0,40}micro.?batch"
            r"|(its|their) own .{0,20}(tokens|labels|count|number)|averag.{0,60}micro"
        )
    ],
    place=[r"micro.?batch", r"ranks?\b", r"count|divisor|denominator|normali[sz]", r"\bdp\b"],
    wrong=[
        r"gradients? (is|are|was|were) (not|never) (all-)?reduced|missing all.?reduce",
        r"(rows?|micro-?batch(es)?) (is|are|was|were) (lost|dropped|missing)",
        r"all.?reduced (twice|again)",
        r"backward (is|of \S+ is) wrong",
    ],
)
WHY = (
    "With label smoothing each micro-batch's loss is the mean over that micro-batch's own active "
    "labels and the two micro-batches are added without the division by the accumulation steps; "
    "tokens of micro-batches with few labels weigh more, all about twice too much."
)
