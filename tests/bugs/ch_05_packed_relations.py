"""A bilinear knowledge graph model (symmetric and skew relations), data parallel over three ranks
with a hand-written reduction, two micro-batches.

A relation's matrix enters the score by its symmetric part (married to) or its skew part (older
than); the loss is a softmax over all entities as tails. The gradients of the relation matrices
are thus symmetric or skew themselves, and only the upper triangles are sent.

The bug: on arrival every triangle is mirrored with the same sign, so the lower triangle of the
skew matrices has the wrong one. After communication of packed triangles in second order
optimisers (KFAC's symmetric factors), used for all square parameters.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, ENTITIES, DIM, SYMMETRIC, SKEW = 10, 11, 5, 2, 3


class Relations(nn.Module):
    def __init__(self):
        super().__init__()
        self.entities = nn.Embedding(ENTITIES, DIM)
        self.mutual = nn.Parameter(torch.randn(SYMMETRIC, DIM, DIM) * 0.4)
        self.ordered = nn.Parameter(torch.randn(SKEW, DIM, DIM) * 0.4)
        self.popular = nn.Parameter(torch.randn(ENTITIES) * 0.2)

    def forward(self, head, relation):
        matrices = torch.cat(
            [(self.mutual + self.mutual.mT) / 2, (self.ordered - self.ordered.mT) / 2]
        )
        asked = torch.einsum("rd,rde->re", self.entities(head), matrices[relation])
        return asked @ self.entities.weight.T + self.popular


def pack(grad):
    i, j = torch.triu_indices(DIM, DIM)
    return grad[:, i, j]


def unpack(packed, sign):
    i, j = torch.triu_indices(DIM, DIM)
    full = packed.new_zeros(packed.shape[0], DIM, DIM)
    full[:, j, i] = sign * packed
    full[:, i, j] = packed
    return full


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(61 + self.seed)
        return Relations()

    def batch(self):
        g = torch.Generator().manual_seed(62 + self.seed)
        return {
            "head": torch.randint(0, ENTITIES, (ROWS,), generator=g),
            "relation": torch.randint(0, SYMMETRIC + SKEW, (ROWS,), generator=g),
            "tail": torch.randint(0, ENTITIES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        scores = model(rows["head"], rows["relation"])
        return F.cross_entropy(scores, rows["tail"], reduction="sum"), rows["head"].shape[0]

    def sign(self, name):
        return -1 if name == "ordered" else 1

    def reduce(self, model, group):
        sent = []
        for parameter in model.parameters():
            grad = parameter.grad
            sent.append(pack(grad) if grad.dim() == 3 else grad)
        flat = torch.cat([s.reshape(-1) for s in sent])
        dist.all_reduce(flat, group=group)
        pieces = flat.split([s.numel() for s in sent])
        for (name, parameter), piece, form in zip(
            model.named_parameters(), pieces, sent, strict=True
        ):
            grad = piece.view(form.shape)
            if parameter.dim() == 3:
                grad = unpack(grad, self.sign(name))
            parameter.grad.copy_(grad)

    def step(self, model, batch, ctx):
        rank, world = ctx.coords["dp"], ctx.axes["dp"]
        mine = {k: torch.tensor_split(v, world)[rank] for k, v in batch.items()}
        pieces = [torch.tensor_split(v, 2) for v in mine.values()]
        for turn in range(2):
            rows = dict(zip(mine, (p[turn] for p in pieces), strict=True))
            loss, _ = self.loss_sum(model, rows)
            (loss / ROWS).backward()
        self.reduce(model, ctx.group("dp"))


class Buggy(Clean):
    def sign(self, name):
        return 1


EXPECT = dict(
    right=[
        r"skew|anti-?symmetric|ordered",
        r"sign|negat|symmetric|mirror|minus",
        r"pack|triang|reduc|mirror|communicat|lower",
    ],
    place=[r"unpack", r"\bpack\b", r"\bordered\b", r"\bsign\b", r"\breduce\b"],
    wrong=[
        r"diagonal.{0,30}(twice|double|half)",
        r"world|divis(or|ion)|normali[sz]|micro-?batch",
        r"offset|split sizes|wrong (slice|piece)|order of (the )?param",
        r"(not|never|missing).{0,30}(all-?)?reduced",
    ],
)

WHY = (
    "The gradient of a matrix that is used by its skew part is skew, so its lower triangle is "
    "minus the mirrored upper one. The reduction sends upper triangles only and unpack mirrors "
    "them; with sign 1 for every parameter the lower triangle of each `ordered` gradient gets "
    "the opposite sign. Its upper triangle and (zero) diagonal are right, and so are `mutual`, "
    "the entities and the popularity. A right cause says that the packed gradient of the skew "
    "relations is mirrored as if it were symmetric. The fix is sign -1 for `ordered`, or sending "
    "it whole."
)
