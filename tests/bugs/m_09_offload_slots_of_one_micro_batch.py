"""A two-stage pipeline, all forwards before all backwards; the first stage keeps its saved activations in a ring of host slots. After
activation-offloading reports (torchtune PR 1443 and its review, Megatron-LM cpu offload with pipelines) and FAULTS C13 (a buffer is used
again too early): the ring is measured on the first micro-batch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2}}}}
ROWS, LENGTH, WORDS, WIDTH, MICRO_BATCHES, CLASSES = 12, 4, 15, 7, 3, 5


class Slots:
    """Host copies of what autograd saves; a slot is used again after `per_micro_batch` x `in_flight` others."""

    def __init__(self, in_flight):
        self.in_flight, self.per_micro_batch, self.used, self.host = in_flight, None, 0, {}

    def to_host(self, tensor):
        slot = (
            self.used
            if self.per_micro_batch is None
            else self.used % (self.per_micro_batch * self.in_flight)
        )
        self.used += 1
        self.host[slot] = tensor.detach().clone()
        return slot

    def to_device(self, slot):
        return self.host[slot]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.value = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 9),
            nn.Linear(WIDTH, 9),
        )
        self.out = nn.Linear(9, WIDTH)

    def forward(self, x):
        x_ = self.norm(x)
        return x + self.out(F.silu(self.gate(x_)) * self.value(x_))


class Early(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, words):
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return x


class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.head = Layer(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.norm(self.layer(x)).mean(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.early, self.late = Early(), Late()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "words": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model.late(model.early(rows["words"]))
        return F.cross_entropy(logits, rows["y"], reduction="sum"), len(rows["y"])

    def distribute(self, model, ctx):
        delattr(model, "late" if ctx.rank == 0 else "early")
        return model

    def slots(self):
        return Slots(in_flight=MICRO_BATCHES)

    def step(self, model, batch, ctx):
        slots, held = self.slots(), []
        for i in range(MICRO_BATCHES):
            rows = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in batch.items()}
            if ctx.rank == 0:
                with torch.autograd.graph.saved_tensors_hooks(slots.to_host, slots.to_device):
                    x = model.early(rows["words"])
                slots.per_micro_batch = slots.per_micro_batch or slots.used
                dist.send(x.detach(), 1)
                held.append(x)
            else:
                x = torch.empty(len(rows["y"]), LENGTH, WIDTH, dtype=ctx.dtype)
                dist.recv(x, 0)
                loss = F.cross_entropy(model.late(x.requires_grad_()), rows["y"], reduction="sum")
                held.append((x, loss / ROWS))
        for item in held:
            if ctx.rank == 0:
                grad = torch.empty_like(item)
                dist.recv(grad, 1)
                item.backward(grad)
            else:
                item[1].backward()
                dist.send(item[0].grad, 0)


class Buggy(Clean):
    def slots(self):
        return Slots(in_flight=1)


EXPECT = dict(
    right=[
        r"early|first stage|stage 0|rank \W?0",
        r"backward|saved|activation|micro-?batch|gradient (of|at|into)|recompute|buffer|overwrit|reuse|direction|stale",
    ],
    place=[r"early", r"rank \W?0|first stage|stage 0", r"micro-?batch"],
    wrong=[
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"late\.\S* (is|are|was|were) (wrong|missing)",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"mean of (the )?(micro|rank|ranks' )\S* ?means",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)|only the last micro-?batch",
    ],
)
WHY = (
    "The ring holds the saved tensors of one micro-batch while three are in flight, so on rank 0 the backwards of micro-batches 0 and "
    "1 read the activations of micro-batch 2 with their own right incoming gradients. All of early.* but early.layers.1.out.bias is "
    "wrong; the forward and late.* are right."
)
