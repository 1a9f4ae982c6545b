"""Two replicas of two tensor-parallel ranks; the first rank of each tensor group reads the data and broadcasts them. After Megatron-LM's
broadcast_data / get_batch_on_this_tp_rank and FAULTS C16 (which rank sees which rows): the loss mask, added later, is
broadcast from rank 0 in the default group.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, LENGTH, WORDS, WIDTH, HIDDEN = 10, 9, 17, 6, 10


class Into(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class OutOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Conv1d(WIDTH, WIDTH, 3)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x, into, out_of):
        x = x + torch.tanh(self.mix(F.pad(x.mT, (2, 0)))).mT
        return x + out_of(self.down(F.gelu(self.up(into(self.norm(x))))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words, into=lambda x: x, out_of=lambda x: x):
        x = self.words(words)
        for layer in self.layers:
            x = layer(x, into, out_of)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        words = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=g)
        prompt = torch.randint(1, LENGTH - 1, (ROWS, 1), generator=g)
        end = torch.randint(LENGTH - 2, LENGTH + 1, (ROWS, 1), generator=g)
        places = torch.arange(LENGTH)
        return {
            "words": words[:, :-1].contiguous(),
            "labels": words[:, 1:].contiguous(),
            "loss_mask": ((places >= prompt) & (places < end)).long(),
        }

    def loss_sum(self, model, rows, *regions):
        logits = model(rows["words"], *regions)
        losses = F.cross_entropy(logits.mT, rows["labels"], reduction="none")
        return (losses * rows["loss_mask"]).sum(), rows["loss_mask"].sum()

    def distribute(self, model, ctx):
        for layer in model.layers:
            for linear, name, dim in (
                (layer.up, "weight", 0),
                (layer.up, "bias", 0),
                (layer.down, "weight", 1),
            ):
                part = getattr(linear, name).detach().chunk(ctx.axes["tp"], dim)[ctx.coords["tp"]]
                setattr(linear, name, nn.Parameter(part.clone()))
        return model

    def share_mask(self, mask, source, group):
        dist.broadcast(mask, source, group=group)

    def read(self, batch, ctx):
        group = ctx.group("tp")
        source = dist.get_global_rank(group, 0)
        rows = {
            k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]].clone() for k, v in batch.items()
        }
        if ctx.rank != source:
            rows = {k: torch.zeros_like(v) for k, v in rows.items()}
        for name in ("words", "labels"):
            dist.broadcast(rows[name], source, group=group)
        self.share_mask(rows["loss_mask"], source, group)
        return rows

    def step(self, model, batch, ctx):
        rows, tp = self.read(batch, ctx), ctx.group("tp")
        loss, count = self.loss_sum(
            model, rows, lambda x: Into.apply(x, tp), lambda x: OutOf.apply(x, tp)
        )
        dist.all_reduce(count, group=ctx.group("dp"))
        (loss / count).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def share_mask(self, mask, source, group):
        dist.broadcast(mask, 0)


EXPECT = dict(
    right=[
        r"mask|token|position|rows? \W?\d|weight|count|ranks? \W?[23]|dp|replica|second half",
        r"mask|wrong (tokens|positions|rows|count|weight)|other (rows|replica|rank)|another (rank|replica|row)|count|weigh|labels|batch|"
        r"data|loss",
    ],
    place=[
        r"ranks? \W?[23]|dp \W?1|dp=1|replica",
        r"rows? \W?[5-9]",
        r"mask|count|token",
        r"(all|every|each) ranks?",
    ],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"(up|down|norm|mix|words)\S* (output|forward) (is|was) wrong|forward of (layers|words|head)\S* (is|was) wrong",
        r"no_grad|detach",
    ],
)
WHY = (
    "Ranks 2 and 3 get the loss mask of rows 0 to 4 for their rows 5 to 9, so the wrong tokens of these rows enter the loss, and the "
    "token count is twice that of the first replica's mask instead of "
    "the sum of both. The logits are right; the gradients of all parameters are wrong on all ranks (rows 0 to 4 by the count alone)."
)
