"""A DTensor model (column- and row-wise weights on `tp`, rows on `dp`): the rows of each data rank become one DTensor sharded over `dp`.
After pytorch issues and forum threads about `distribute_tensor` in training loops (it scatters the tensor of rank 0, `from_local` keeps
each rank's own) and FAULTS C16 (which rank holds what).
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3, "tp": 2}}}}
ROWS, INPUTS, WIDTH, INNER, CLASSES = 18, 7, 6, 10, 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(INPUTS, WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = torch.tanh(self.enter(x))
        return self.head(x + self.down(F.gelu(self.up(x))))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        level = torch.linspace(-1, 1, ROWS)[:, None]
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g) + level,
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
            "weight": torch.rand(ROWS, generator=g) + 0.2,
        }

    @staticmethod
    def row_loss(logits, rows):
        picked = (logits.log_softmax(-1) * F.one_hot(rows["y"], CLASSES)).sum(-1)
        return -(picked * rows["weight"]).sum()

    def loss_sum(self, model, rows):
        return self.row_loss(model(rows["x"]), rows), rows["weight"].sum()

    def distribute(self, model, ctx):
        places = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
        for name, param in list(model.named_parameters()):
            module = model.get_submodule(name.rpartition(".")[0])
            value = distribute_tensor(
                param.data, ctx.mesh, [Replicate(), places.get(name, Replicate())]
            )
            setattr(module, name.rpartition(".")[2], nn.Parameter(value))
        return model

    def to_mesh(self, x, mesh):
        return DTensor.from_local(x, mesh, [Shard(0), Replicate()])

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        x = self.to_mesh(mine["x"], ctx.mesh)
        logits = model(x).redistribute(placements=[Shard(0), Replicate()]).to_local()
        rows = {k: self.to_mesh(v, ctx.mesh).to_local() for k, v in mine.items()}
        (self.row_loss(logits, rows) / batch["weight"].sum()).backward()
        for param in model.parameters():
            places = [p if p.is_shard() else Replicate() for p in param.placements]
            param.grad = param.grad.redistribute(placements=places)


class Buggy(Clean):
    def to_mesh(self, x, mesh):
        return distribute_tensor(x, mesh, [Shard(0), Replicate()])


EXPECT = dict(
    right=[
        r"rows?|batch|data|sample|input",
        r"rank \W?0|dp \W?0|first (data |dp )?(rank|share|rows)|missing|not counted|never counted|left out|lost|0 times|\b0\b|"
        r"only|zero|dropped|rows? \W?(6|12|\d+\W+17)",
    ],
    place=[r"rows? ", r"ranks?", r"\bdp\b"],
    wrong=[
        r"mean of (the )?(rank |ranks' )?means",
        r"(up|down)\.\S* (is|are|was|were) (never|not) (all.?)?(reduced|summed)",
        r"reduced (twice|again)",
        r"(wrong|other|bad) (divisor|denominator|normali[sz])",
        r"(tensor|tp)\W.{0,20}(never|not) (summed|reduced)",
        r"averag\w+ (instead|where)",
    ],
)
WHY = (
    "distribute_tensor scatters the six rows of dp rank 0 over the three dp ranks and throws the rows of dp ranks 1 and 2 away: rows "
    "0-5 count once with the right divisor, rows 6-17 count not at all. All gradients, on all six ranks, are those of the first third "
    "of the batch alone."
)
