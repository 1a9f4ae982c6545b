"""A hand-written pipeline of three stages with a mixture of experts in each; every router has a z-loss. After reports on auxiliary MoE
losses under pipeline parallelism (torchtitan, nanotron; the reason for Megatron's MoEAuxLossAutoScaler) and FAULTS class C10
(aux_dropped): a stage that is not the last starts its backward from the gradient of what it sent, and its own z-loss is not part of that.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, LENGTH, INPUTS, WIDTH, EXPERTS, CLASSES, MICRO_BATCHES, COEFFICIENT = 7, 6, 4, 6, 3, 5, 3, 0.2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 7), nn.ReLU(), nn.Linear(7, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, x, mask):
        h = self.norm(x)
        logits = self.router(h)
        z_loss = (logits.logsumexp(-1).square() * mask).sum()
        weights = logits.softmax(-1)
        return x + sum(
            weights[..., i, None] * expert(h) for i, expert in enumerate(self.experts)
        ), z_loss


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(INPUTS, WIDTH)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(3)})
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, mask):
        x, z_loss = self.first(x), 0.0
        for layer in self.layers.values():
            x, z = layer(x, mask)
            z_loss = z_loss + z
        return self.head(x), z_loss


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "classes": lambda m, r: (self.class_loss(m(r["x"], r["mask"])[0], r), r["mask"].sum()),
            "z_loss": lambda m, r: (COEFFICIENT * m(r["x"], r["mask"])[1], r["mask"].sum()),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return Network()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "x": torch.randn(ROWS, LENGTH, INPUTS, generator=g),
            "mask": torch.arange(LENGTH) < lengths,
            "y": torch.randint(CLASSES, (ROWS, LENGTH), generator=g),
        }

    @staticmethod
    def class_loss(logits, rows):
        return (F.cross_entropy(logits.mT, rows["y"], reduction="none") * rows["mask"]).sum()

    def loss_sum(self, model, rows):
        logits, z_loss = model(rows["x"], rows["mask"])
        return self.class_loss(logits, rows) + COEFFICIENT * z_loss, rows["mask"].sum()

    def distribute(self, model, ctx):
        for i in range(3):
            if i != ctx.rank:
                del model.layers[str(i)]
        if ctx.rank > 0:
            del model.first
        if ctx.rank < 2:
            del model.head
        return model

    def stage_backward(self, out, z_loss, gradient):
        torch.autograd.backward([out, z_loss], [gradient, None])

    def step(self, model, batch, ctx):
        count, layer, held = batch["mask"].sum(), model.layers[str(ctx.rank)], []
        micros = [
            {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in batch.items()}
            for i in range(MICRO_BATCHES)
        ]

        def receive(rows, source):
            x = torch.empty(len(rows["x"]), LENGTH, WIDTH, dtype=ctx.dtype)
            dist.recv(x, source)
            return x

        for rows in micros:
            x = receive(rows, ctx.rank - 1).requires_grad_() if ctx.rank else model.first(rows["x"])
            out, z_loss = layer(x, rows["mask"])
            if ctx.rank < 2:
                dist.send(out.detach(), ctx.rank + 1)
            held.append((x, out, COEFFICIENT * z_loss / count))
        for rows, (x, out, z_loss) in zip(micros, held, strict=True):
            if ctx.rank == 2:
                (self.class_loss(model.head(out), rows) / count + z_loss).backward()
            else:
                self.stage_backward(out, z_loss, receive(rows, ctx.rank + 1))
            if ctx.rank:
                dist.send(x.grad, ctx.rank - 1)


class Buggy(Clean):
    def stage_backward(self, out, z_loss, gradient):
        out.backward(gradient)


EXPECT = dict(
    right=[
        r"z_loss|z-loss|router|aux",
        r"missing|miss\w*|lack\w*|lost|lose|dropped|absent|without|no (part|gradient)|not (reach|flow|part|includ|contain|"
        r"counted)|never|left out|detach",
    ],
    place=[
        r"layers\.[01]",
        r"z_loss|z-loss",
        r"first",
        r"stages? \W?[01]|(first|early|earlier|middle) stages?|ranks? \W?[01]",
    ],
    wrong=[
        r"layers\.2\S* (is|are|was|were) (wrong|missing)",
        r"head\S* (is|are|was|were) wrong",
        r"classes (term )?(is|was) (wrong|missing|lost|dropped)",
        r"forward (pass )?(is|was) (wrong|different)",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
        r"(counted|reduced|summed) (twice|again)",
        r"never (been )?(all.?)?reduced|mean of (the )?(rank |ranks' )?means",
    ],
)
WHY = (
    "Stages 0 and 1 run backward from the gradient of their output alone, so their own routers' z-loss is lost: first.*, "
    "layers.0.norm/router, layers.1.norm/router (and layers.0.experts, through layer 1's router) lack it. Stage 2 with its z-loss, "
    "whose part still travels back to all, is right, as is the class term everywhere; layers.1.experts.* is right, too (its output "
    "meets layer 2's router only)."
)
