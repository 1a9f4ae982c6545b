"""A two-stage pipeline whose micro-batches have different lengths; a stage re-initialises on a new shape.
After FAULTS C12-04 (Automodel PR 3530): the re-initialisation throws away what was accumulated so far."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2}}}}
ROWS, VOCAB, WIDTH, MICRO_BATCHES = 10, 16, 8, 4
LENGTHS = (3, 3, 3, 3, 3, 5, 5, 5, 5, 4)  # the loader groups rows by length


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.kv, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 4),
            nn.Linear(4, WIDTH, bias=False),
        )
        self.k = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        y = self.norm(x)
        latent = torch.tanh(self.kv(y))
        y = F.scaled_dot_product_attention(self.q(y), self.k(latent), latent, is_causal=True)
        return x + self.out(y)


class Front(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCAB, WIDTH), Block()

    def forward(self, ids):
        return self.block(self.embed(ids))


class Back(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.norm, self.head = Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, x):
        return self.head(self.norm(self.block(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.front, self.back = Front(), Back()


class Stage:
    """Buffers of one stage for the shape in use."""

    def __init__(self, module, dtype):
        self.module, self.dtype, self.shape = module, dtype, None

    def initialize(self, shape, keep_grads):
        if shape == self.shape:
            return
        self.shape = shape
        self.buffer = torch.zeros(shape, dtype=self.dtype)
        if not keep_grads:
            for param in self.module.parameters():
                param.grad = None


class Clean:
    keep_grads = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, max(LENGTHS) + 1), generator=g)
        return {"ids": ids, "lengths": torch.tensor(LENGTHS)}

    @staticmethod
    def loss_of(logits, rows):
        length = logits.shape[1]
        past = torch.arange(length) >= rows["lengths"][:, None]
        labels = rows["ids"][:, 1 : length + 1].masked_fill(past, -100)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        logits = model.back(model.front(rows["ids"][:, :-1]))
        return self.loss_of(logits, rows), rows["lengths"].sum()

    def distribute(self, model, ctx):
        if ctx.coords["pp"] == 0:
            del model.back
        else:
            del model.front
        return model

    def step(self, model, batch, ctx):
        first = ctx.coords["pp"] == 0
        stage = Stage(model.front if first else model.back, ctx.dtype)
        for i in range(MICRO_BATCHES):
            rows = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in batch.items()}
            length = int(rows["lengths"].max())
            stage.initialize((len(rows["ids"]), length, WIDTH), self.keep_grads)
            if first:
                x = stage.module(rows["ids"][:, :length])
                dist.send(x.detach().contiguous(), 1)
                dist.recv(stage.buffer, 1)
                x.backward(stage.buffer)
            else:
                dist.recv(stage.buffer, 0)
                x = stage.buffer.clone().requires_grad_()
                loss = self.loss_of(stage.module(x), rows)
                (loss / batch["lengths"].sum()).backward()
                dist.send(x.grad, 0)


class Buggy(Clean):
    keep_grads = False


EXPECT = dict(
    right=[
        (
            r"rows?\b.{0,60}(missing|lost|dropped|absent|zero|not (in|there|counted|arrive)|0\b)|micro.?batch"
            r"|(missing|lost|dropped|without|lacks?|no).{0,60}(rows|micro)|only .{0,40}(rows|micro)"
        ),
        r"missing|lost|dropped|absent|only|lacks?|zero|not (in|there|counted|included)|without|last|discard|overwrit|reset|clear",
    ],
    place=[r"rows? \W?\d", r"rows?", r"micro.?batch", r"ranks?"],
    wrong=[
        r"(not|never) (all-)?reduced|missing (all.?)?reduc",
        r"(reduced|counted|divided) (twice|again)",
        r"mean of (the )?means|own count",
        r"last micro-?batch (is|was) (lost|missing|dropped)",
        r"forward (is|was) wrong",
    ],
)
WHY = (
    "Each time the shape changes the stage sets its gradients to None, so on both stages only the "
    "micro-batches since the last change of shape are left; the rows of the earlier ones are missing."
)
