"""A pipeline of mixture-of-experts stages; the auxiliary loss enters the backward by an autograd function that scales its gradient.
After Megatron-LM's MoEAuxLossAutoScaler (its scale is a class variable, set per micro-batch), Automodel PR 1412 and FAULTS C10-08:
several micro-batches are in flight, and all read the scale of the one whose forward came last.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2}}}}
ROWS, LENGTH, VOCAB, WIDTH, EXPERTS, MICRO_BATCHES, AUX = 9, 7, 16, 6, 4, 3, 0.3


class AuxLoss(torch.autograd.Function):
    """x, whose backward adds scale times the gradient of aux"""

    @staticmethod
    def forward(ctx, x, aux, scale):
        ctx.scale, ctx.dtype = scale, aux.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.as_tensor(ctx.scale["value"], dtype=ctx.dtype), None


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.past, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5 * EXPERTS)
        self.down = nn.Parameter(torch.randn(EXPERTS, 5, WIDTH) / 2)

    def forward(self, x):
        x = x + torch.tanh(self.past(x.cumsum(1)))
        logits = 2 * self.router(self.norm(x))
        y = F.gelu(self.up(self.norm(x))).unflatten(-1, (EXPERTS, 5))
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        return x + torch.einsum("bleh,ehw,ble->blw", y, self.down, logits.softmax(-1)), -entropy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.first, self.second = Experts(), Experts()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"lm": lambda m, r: self.term(m, r, 0), "aux": lambda m, r: self.term(m, r, 1)}

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = (
            torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g).sort(0, descending=True).values
        )
        return {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def term(self, model, rows, i):
        labels = rows["labels"]
        x, one = model.first(model.embed(rows["tokens"]))
        x, two = model.second(x)
        aux = AUX * ((one + two) * (labels != -100)).sum()
        return (self.token_loss(model.head(x), labels), aux)[i], (labels != -100).sum()

    def loss_sum(self, model, rows):
        return self.term(model, rows, 0)[0] + self.term(model, rows, 1)[0], (
            rows["labels"] != -100
        ).sum()

    def distribute(self, model, ctx):
        for name in (("second", "head"), ("embed", "first"))[ctx.rank]:
            delattr(model, name)
        return model

    def scale_of(self, tokens):
        return {"value": tokens}

    def step(self, model, batch, ctx):
        held, n = [], (batch["labels"] != -100).sum()
        for i in range(MICRO_BATCHES):
            rows = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in batch.items()}
            valid = rows["labels"] != -100
            x = None
            if ctx.rank == 0:
                y, aux = model.first(model.embed(rows["tokens"]))
            else:
                x = torch.empty(*valid.shape, WIDTH, dtype=ctx.dtype)
                dist.recv(x, 0)
                y, aux = model.second(x.requires_grad_())
            y = AuxLoss.apply(
                y, AUX * (aux * valid).sum() / valid.sum(), self.scale_of(valid.sum())
            )
            if ctx.rank == 0:
                dist.send(y.detach(), 1)
            else:
                y = self.token_loss(model.head(y), rows["labels"])
            held.append((x, y))
        for x, y in held:
            grad = torch.ones_like(y)
            if ctx.rank == 0:
                dist.recv(grad, 1)
            y.backward(grad)
            if ctx.rank == 1:
                dist.send(x.grad, 0)
        for param in model.parameters():
            param.grad /= n


class Buggy(Clean):
    main_loss_backward_scale = {"value": 1}

    def scale_of(self, tokens):
        self.main_loss_backward_scale["value"] = tokens
        return self.main_loss_backward_scale


EXPECT = dict(
    right=[
        r"aux|router",
        r"micro-?batch|weigh|scale|coefficient|count|normali[sz]|rows|tokens|factor|smaller|too (small|little)",
    ],
    place=[r"aux", r"router", r"(first|second)\.", r"rows|micro"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"(lm|language) (term|loss) .{0,20}(wrong|scaled|missing|twice)",
        r"head\.\S* (is|are|was|were) (wrong|missing)",
        r"aux (term|loss)? ?(is|was) (dropped|missing|lost)|detach",
    ],
)
WHY = (
    "All three micro-batches are in flight when the backward begins, and all read the scale (number of valid tokens) of the third, "
    "the smallest: the aux term of the first and the second counts too little, by n_3/n_1 and n_3/n_2. Wrong are routers and what "
    "lies before them on both stages; the language-model term, head and the forward are right."
)
