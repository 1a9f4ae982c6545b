"""A long sequence cut over ranks for an LSTM: the state goes from rank to rank, its gradient back.
After FAULTS class C07 (adjoint of a hand-written exchange): of the two states only the hidden one comes back."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, LENGTH, SYMBOLS, WIDTH, LAYERS = 6, 8, 11, 7, 2


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True)
        self.norm, self.tags = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, ids, state=None):
        x, state = self.lstm(self.symbols(ids), state)
        return self.tags(self.norm(x)), state


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Tagger()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(SYMBOLS, (ROWS, LENGTH), generator=g),
            "tags": torch.randint(5, (ROWS, LENGTH), generator=g),
        }

    @staticmethod
    def tag_loss(logits, tags):
        return F.cross_entropy(logits.flatten(0, 1), tags.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        logits, _ = model(rows["ids"])
        return self.tag_loss(logits, rows["tags"]), rows["tags"].numel()

    def step(self, model, batch, ctx):
        at, ranks = ctx.coords["cp"], ctx.axes["cp"]
        mine = {k: v.tensor_split(ranks, dim=1)[at] for k, v in batch.items()}
        state = torch.zeros(2, LAYERS, ROWS, WIDTH, dtype=ctx.dtype)
        if at > 0:
            dist.recv(state, ctx.rank - 1)
        h, c = state.clone().unbind(0)
        h, c = h.clone().requires_grad_(), c.clone().requires_grad_()
        logits, (h_out, c_out) = model(mine["ids"], (h, c))
        loss = self.tag_loss(logits, mine["tags"]) / batch["tags"].numel()
        if at + 1 < ranks:
            dist.send(torch.stack([h_out, c_out]).detach(), ctx.rank + 1)
            grads = torch.empty_like(state)
            dist.recv(grads, ctx.rank + 1)
            torch.autograd.backward([loss, h_out, c_out], [None, grads[0], grads[1]])
        else:
            loss.backward()
        if at > 0:
            dist.send(self.state_gradient(h, c), ctx.rank - 1)
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("cp"))

    def state_gradient(self, h, c):
        return torch.stack([h.grad, c.grad])


class Buggy(Clean):
    def state_gradient(self, h, c):
        return torch.stack([h.grad, torch.zeros_like(h.grad)])


EXPECT = dict(
    right=[
        r"lstm|symbols|state|cell",
        (
            r"backward|adjoint|gradient.{0,60}(state|cell|back|previous|earlier|next|later|other)|(state|cell)"
            r"|later (positions|tokens|rank|stretch|part)|across (the )?(cp|ranks|cut|border|bound)|earlier (positions|tokens"
            r"|ranks?|stretch|part)|detach|truncat|missing|lost|cut off|(not|never) (sent|passed|propagated|flow)"
        ),
    ],
    place=[r"lstm", r"\bcp\b", r"ranks? \W?[01]", r"state"],
    wrong=[
        r"(reduced|counted|divided) (twice|again)",
        r"mean of (the )?means",
        r"forward (is|was) wrong|wrong forward|output (is|was) wrong",
        r"(tags|norm)\S* (is|are) wrong",
        r"gradients? of \S*(weight|bias)\S* (is|are|was) (not|never) (all-)?reduced",
        r"rows? (is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "The gradient of the cell state is not sent back to the rank with the earlier stretch (zeros are), so ranks 0 "
    "and 1 miss part of the gradient through time: lstm and symbols are wrong, norm and tags right, forward right."
)
