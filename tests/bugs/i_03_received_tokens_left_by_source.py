"""A sparse decoder with six experts, two on each of three expert-parallel ranks; tokens are exchanged with an all-to-all. After
Megatron-LM's MoEAlltoAllTokenDispatcher, which sorts the received chunks by local expert when a rank holds several
(`sort_chunks_by_idxs`): without it the chunks lie by source rank, and the experts' counts cut them at other places.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"ep": 3}}}}
ROWS, LENGTH, WIDTH, HIDDEN, VOCABULARY, EXPERTS, LOCAL = 8, 10, 6, 7, 17, 6, 2


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive):
        ctx.sizes = send, receive
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        send, receive = ctx.sizes
        out = grad.new_empty(sum(send), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), send, receive)
        return out, None, None


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5)

    def forward(self, x, counts):
        parts = x.split(counts)
        return torch.cat(
            [
                F.silu(p @ up.T) @ down.T
                for p, up, down in zip(parts, self.up, self.down, strict=True)
            ]
        )


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = (
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def forward(self, x, dispatch):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        tokens = self.norm2(x).flatten(0, 1)
        gate, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS)
        mixed = dispatch(self.experts, tokens[order], counts)
        return x + (gate[:, None] * mixed[order.argsort()]).view_as(x)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, dispatch=lambda experts, x, counts: experts(x, counts.tolist())):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, dispatch)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Sparse()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(4, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.token_loss(model(rows["ids"]), rows["labels"]), (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        mine = slice(LOCAL * ctx.rank, LOCAL * (ctx.rank + 1))
        for layer in model.layers:
            for name, param in list(layer.experts.named_parameters()):
                setattr(layer.experts, name, nn.Parameter(param.detach()[mine].clone()))
        return model

    def by_expert(self, counts):
        """counts (source, local expert) -> where the rows, which lie by source, go when they lie by expert"""
        expert = torch.arange(LOCAL).repeat(len(counts)).repeat_interleave(counts.flatten())
        return expert.argsort(stable=True)

    def dispatch(self, experts, x, counts):
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        theirs = theirs.view(-1, LOCAL)
        send, receive = counts.view(-1, LOCAL).sum(1).tolist(), theirs.sum(1).tolist()
        order = self.by_expert(theirs)
        out = experts(Exchange.apply(x, send, receive)[order], theirs.sum(0).tolist())
        return Exchange.apply(out[order.argsort()], receive, send)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss = self.token_loss(model(mine["ids"], self.dispatch), mine["labels"])
        (loss / (batch["labels"] != -100).sum()).backward()
        for name, param in model.named_parameters():
            if ".experts." not in name:
                dist.all_reduce(param.grad)


class Buggy(Clean):
    def by_expert(self, counts):
        return torch.arange(int(counts.sum()))


EXPECT = dict(
    right=[
        r"layers\.0|expert",
        r"forward|output|activation|values? (of|at|in)|order|permut|wrong (tokens|experts?)|other (tokens|experts?)|dispatch|layout|"
        r"input of",
    ],
    place=[r"layers\.0", r"expert", r"(all|every|each) ranks?|ranks? \W?[012]"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (right|exact|correct)$",
        r"divided by .{0,30}(expert|ep)",
        r"detach|no_grad",
    ],
)
WHY = (
    "The tokens that a rank receives lie by source rank, but are cut by the totals of its two experts as if they lay by expert, so "
    "some tokens are computed by the rank's other expert. "
    "The forward is wrong from layers.0.experts on, on every rank whose chunks are not in order, and with it all gradients."
)
