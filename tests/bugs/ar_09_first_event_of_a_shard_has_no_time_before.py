"""Context parallelism by hand on three ranks for sequences of events (a neural point process): every event has a kind and a time stamp, the model reads the kind, the logarithm of the time since the event before and its own time, and a
causal attention over the gathered keys and values gives the kind of the next event. Rows of 12 events are cut along the sequence in three parts of 4; five rows, micro-batches of two, two and one, the first events of a row without
label.

The bug: the differences of the time stamps are taken after the sequence was cut, with the first stamp of the part put in front, so that the first event of every part but the first of all has the difference zero. A fault of the family
in NVIDIA/Megatron-LM issue 7452 (silent errors where parallelisms meet: values of the neighbouring token taken inside the own part), here in an input feature.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, EVENTS, KINDS, WIDTH, PARTS = 5, 12, 6, 8, 3
MICRO = [(0, 2), (2, 4), (4, 5)]


class GatherEvents(torch.autograd.Function):
    """The whole sequence; backward: the sum of all ranks' gradients for the own part."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(PARTS)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(PARTS, 1)[dist.get_rank(ctx.group)].contiguous(), None


def waiting_times(time):
    """Time since the event before; none before the first."""
    return torch.log1p(torch.diff(time, dim=1, prepend=time[:, :1]))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind = nn.Embedding(KINDS, WIDTH)
        self.clock = nn.Linear(2, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, KINDS)
        self.group = None

    def forward(self, kind, time, waited, first=0):
        x = self.kind(kind) + torch.sin(self.clock(torch.stack([waited, time / 10], -1)))
        k, v = self.key(x), self.value(x)
        if self.group is not None:
            k, v = GatherEvents.apply(k, self.group), GatherEvents.apply(v, self.group)
        rows = first + torch.arange(x.shape[1])
        seen = torch.arange(k.shape[1])[None] <= rows[:, None]
        score = self.query(x) @ k.transpose(1, 2) * WIDTH**-0.5
        x = x + score.masked_fill(~seen, float("-inf")).softmax(-1) @ v
        return self.head(self.norm(x))


def event_loss(logits, labels):
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


class Clean:
    cut_first = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        labels = torch.randint(KINDS, (ROWS, EVENTS), generator=g)
        labels[torch.arange(EVENTS)[None] < torch.tensor([1, 3, 0, 2, 5])[:, None]] = -100
        return {
            "kind": torch.randint(KINDS, (ROWS, EVENTS), generator=g),
            "time": (torch.rand(ROWS, EVENTS, generator=g) * 3).cumsum(1),
            "labels": labels,
        }

    def loss_sum(self, model, rows):
        logits = model(rows["kind"], rows["time"], waiting_times(rows["time"]))
        return event_loss(logits, rows["labels"]), int((rows["labels"] != -100).sum())

    def distribute(self, model, ctx):
        model.group = ctx.group("cp")
        return model

    def step(self, model, batch, ctx):
        size = EVENTS // PARTS
        first = ctx.rank * size
        mine = slice(first, first + size)
        valid = int((batch["labels"] != -100).sum())
        for low, high in MICRO:
            kind, time, labels = (batch[k][low:high] for k in ("kind", "time", "labels"))
            if self.cut_first:
                waited = waiting_times(time[:, mine])
            else:
                waited = waiting_times(time)[:, mine]
            logits = model(kind[:, mine], time[:, mine], waited, first)
            (event_loss(logits, labels[:, mine]) / valid).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("cp"))


class Buggy(Clean):
    cut_first = True


EXPECT = dict(
    right=[
        r"(?i)clock|input|wait|time|feature|forward|first (event|token|position|element)",
        r"(?i)ranks? 1 and (rank )?2|ranks? 1, 2|1 and 2|border|boundar|first (event|token|position"
        r"|element|column)|shard|part|cut|clock|position",
        r"(?i)clock|input|wait|time|feature|differ",
    ],
    place=[r"(?i)clock|wait|time|input"],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)forward is right|wrong only in the backward",
        r"(?i)labels? .{0,20}(is|are) (wrong|shifted)|causal mask .{0,20}wrong",
        r"(?i)(gather|GatherEvents|all.?gather) .{0,30}(wrong|adjoint|backward)",
        r"(?i)only (on )?rank \d\b|rank \d alone|rank 0 .{0,20}(is|goes) wrong",
    ],
)
WHY = (
    "On ranks 1 and 2 the first event of the part (events 4 and 8 of every row) gets waiting time log1p(0) = 0 instead of the time since the last event of the rank before. The forward goes wrong at the input of clock, on "
    "ranks 1 and 2, in one column of each, in all micro-batches; rank 0 (event 0 really has none before) has right inputs, its queries see only its own keys. Through the gathered keys and values rank 2 also sees the wrong "
    "event 4 of rank 1. Gradients: clock, kind, query, key, value, norm, head are all wrong somewhat, equally on all ranks after the all-reduce. Labels, causal mask, gather and its adjoint, divisor, reduction are right. Fix: "
    "take the differences of the whole sequence before cutting (or get the last stamp of the rank before)."
)
