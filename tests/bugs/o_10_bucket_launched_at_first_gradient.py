"""A speech recogniser with CTC loss under an own bucketed data parallelism: hooks count the gradients that are ready, a full bucket is
reduced asynchronously in the last of three micro-batches. After reports on hand-written DDP hooks with no_sync: the counter also counts the
gradients of the micro-batches that are not reduced.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, FRAMES, BANDS, WIDTH, SYMBOLS, LABELS, MICRO = 13, 9, 5, 8, 7, 3, 3


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Conv1d(BANDS, WIDTH, 3, padding=1)
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.around = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.end = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, sound):
        x = F.gelu(self.front(sound.mT).mT)
        y = self.norm(x)
        y = self.value(y) * torch.sigmoid(self.gate(y))
        x = x + self.around(y.mT).mT
        return self.head(self.end(x)).log_softmax(-1)


class Reducer:
    def __init__(self, params, group, limit=120):
        self.group, self.sync, self.buckets, self.of = group, False, [], {}
        for p in reversed(params):
            if not self.buckets or self.buckets[-1]["size"] + p.numel() > limit:
                self.buckets.append({"params": [], "size": 0, "ready": 0, "work": None})
            bucket = self.buckets[-1]
            bucket["params"].append(p)
            bucket["size"] += p.numel()
            self.of[p] = bucket
        self.hooks = [p.register_post_accumulate_grad_hook(self.ready) for p in params]

    def ready(self, p):
        bucket = self.of[p]
        if not self.sync:
            return
        bucket["ready"] += 1
        self.launch_if_full(bucket)

    def launch_if_full(self, bucket):
        if bucket["ready"] >= len(bucket["params"]) and bucket["work"] is None:
            bucket["flat"] = torch.cat([p.grad.flatten() for p in bucket["params"]])
            bucket["work"] = dist.all_reduce(bucket["flat"], group=self.group, async_op=True)

    def finish(self):
        for bucket in self.buckets:
            bucket["work"].wait()
            parts = bucket["flat"].split([p.numel() for p in bucket["params"]])
            for p, part in zip(bucket["params"], parts, strict=True):
                p.grad.copy_(part.view_as(p))
        for hook in self.hooks:
            hook.remove()


class EagerReducer(Reducer):
    def ready(self, p):
        bucket = self.of[p]
        bucket["ready"] += 1
        if self.sync:
            self.launch_if_full(bucket)


class Clean:
    reducer = Reducer

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Recogniser()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "sound": torch.randn(ROWS, FRAMES, BANDS, generator=g),
            "frames": torch.randint(FRAMES - 2, FRAMES + 1, (ROWS,), generator=g),
            "text": torch.randint(1, SYMBOLS, (ROWS, LABELS), generator=g),
            "labels": torch.randint(1, LABELS + 1, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        loss = F.ctc_loss(
            model(rows["sound"]).transpose(0, 1),
            rows["text"],
            rows["frames"],
            rows["labels"],
            reduction="sum",
        )
        return loss, rows["labels"].sum()

    def step(self, model, batch, ctx):
        reducer = self.reducer(list(model.parameters()), ctx.group("dp"))
        total = batch["labels"].sum()
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        for m in range(MICRO):
            reducer.sync = m == MICRO - 1
            loss, _ = self.loss_sum(model, {k: v.tensor_split(MICRO)[m] for k, v in mine.items()})
            (loss / total).backward()
        reducer.finish()


class Buggy(Clean):
    reducer = EagerReducer


EXPECT = dict(
    right=[
        r"micro|last|third|final|accumul|backward",
        r"micro|bucket|stale|early|before|lost|lacks?|missing|dropp|without|not (included|in)|overwrit|partial",
    ],
    place=[r"bucket|param|front|norm|gate|value|around|\bend\b|head|(all|every|each) ranks?"],
    wrong=[
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"mean of (the )?means|own (count|denominator|divisor)",
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(first|1st) micro.?batch.{0,20}(is|was) (lost|missing|dropped)",
        r"forward (pass )?(is|was) wrong",
    ],
)
WHY = (
    "The counter of ready gradients also counts the two micro-batches that are not reduced, so in the last micro-batch a bucket is copied "
    "and launched at its first gradient. The bucket's other parameters go in without the last micro-batch, and the copy back overwrites "
    "it: they lack the last micro-batch on all ranks. The first ready parameter of each bucket is right."
)
