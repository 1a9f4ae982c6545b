"""Domain-adversarial training (DANN) with the encoder on one pipeline stage and both heads on the next. Modelled on the reports on
gradient reversal layers in ports (a reversal that is applied twice trains the encoder to help the discriminator) and on pipeline cuts
that repeat a boundary layer on both sides (torch.distributed.pipelining's manual stage splits).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"adapt": {"axes": {"dp": 2, "pp": 2}}}}
ROWS, INPUTS, WIDTH, CLASSES, STRENGTH, MICRO_BATCHES = 13, 6, 7, 4, 0.6, 2


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return -STRENGTH * grad


class Adaptive(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(INPUTS, 10), nn.LayerNorm(10), nn.GELU(), nn.Linear(10, WIDTH)
        )
        self.label = nn.Linear(WIDTH, CLASSES)
        self.domain = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1))


def domain_loss(model, features, rows):
    return F.binary_cross_entropy_with_logits(
        model.domain(features)[:, 0], rows["is_target"], reduction="sum"
    )


def label_loss(model, features, rows):
    each = F.cross_entropy(model.label(features), rows["y"], reduction="none")
    return (each * (1 - rows["is_target"])).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "label": lambda m, r: (label_loss(m, m.encoder(r["x"]), r), (1 - r["is_target"]).sum()),
            "domain": lambda m, r: (
                domain_loss(m, Reversed.apply(m.encoder(r["x"])), r),
                len(r["x"]),
            ),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return Adaptive()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        is_target = (torch.rand(ROWS, generator=g) < 0.5).float()
        is_target[::5] = 0
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g) + 0.8 * is_target[:, None],
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
            "is_target": is_target,
        }

    def loss_sum(self, model, rows):
        h, n = model.encoder(rows["x"]), len(rows["x"])
        labels = label_loss(model, h, rows) / (1 - rows["is_target"]).sum().clamp(min=1)
        return n * labels + domain_loss(model, Reversed.apply(h), rows), n

    def distribute(self, model, ctx):
        for name in ("label", "domain") if ctx.coords["pp"] == 0 else ("encoder",):
            delattr(model, name)
        return model

    def for_discriminator(self, features):
        """The first stage has already put the reversal before the send."""
        return features

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        micros = [
            {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            for i in range(MICRO_BATCHES)
        ]
        sources = (1 - batch["is_target"]).sum()
        if ctx.coords["pp"] == 0:
            sent = []
            for rows in micros:
                h = model.encoder(rows["x"])
                sent.append((h, Reversed.apply(h)))
                for t in sent[-1]:
                    dist.send(t.detach().contiguous(), ctx.rank + 1)
            for pair in sent:
                gradients = [torch.empty_like(t) for t in pair]
                for grad in gradients:
                    dist.recv(grad, ctx.rank + 1)
                torch.autograd.backward(pair, gradients)
        else:
            losses = []
            for rows in micros:
                pair = [torch.empty(len(rows["x"]), WIDTH, dtype=ctx.dtype) for _ in range(2)]
                for t in pair:
                    dist.recv(t, ctx.rank - 1)
                    t.requires_grad_()
                loss = label_loss(model, pair[0], rows) / sources
                losses.append(
                    (pair, loss + domain_loss(model, self.for_discriminator(pair[1]), rows) / ROWS)
                )
            for pair, loss in losses:
                loss.backward()
                for t in pair:
                    dist.send(t.grad.contiguous(), ctx.rank - 1)
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def for_discriminator(self, features):
        return Reversed.apply(features)


EXPECT = dict(
    right=[
        r"encoder",
        r"domain|adversar|discriminator|revers",
        r"sign|negativ|opposite|revers|minus|-\s?0?\.6|-\s?3/5|factor|scaled|coefficient|wrong direction|flip",
    ],
    place=[r"encoder", r"domain"],
    wrong=[
        r"(domain|label)\.\d?\S* (is|are|has|have) (a )?wrong",
        r"label (term|loss)\S* .{0,25}(is|was|has) (wrong|lost|scaled|missing|counted)",
        r"(never|not) (been )?(all.?)?(reduced|summed|averaged)",
        r"forward (pass )?(is|was) wrong",
        r"(reduced|summed) (twice|again)",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "The gradient of the domain term is reversed on the second stage and again on the first: the encoder (ranks 0 and 2) gets it times "
    "STRENGTH squared with a positive sign, that is -0.6 times what it should be. The label term, both heads and the forward are right."
)
