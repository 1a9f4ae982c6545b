"""A speech encoder on its own data-parallel ranks and a language model on three tensor-parallel ranks; features go over, gradients
come back. After Megatron-Core's bridge communicator for heterogeneous parallelism (one leader per data-parallel replica talks) and
FAULTS C03-07 and C06-01: every tensor rank sends back its (already complete) gradient, and the encoder adds what arrives.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

TOPOLOGY = {"pools": {"encoder": {"axes": {"dp": 2}}, "lm": {"axes": {"tp": 3}}}}
ENCODERS, TENSOR = [0, 1], [2, 3, 4]
ROWS, FRAMES, SOUND, LENGTH, VOCAB, WIDTH, HIDDEN = 7, 4, 5, 5, 13, 6, 12


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(SOUND, WIDTH, 3, padding=1), nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, frames):
        return self.out(F.gelu(self.norm(self.conv(frames.mT).mT)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.past = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up = nn.Parameter(torch.randn(HIDDEN, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(WIDTH, HIDDEN) / HIDDEN**0.5)

    def forward(self, x, group):
        x = x + torch.tanh(self.past(x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]))
        h = self.norm(x)
        if group is None:
            return x + F.gelu(h @ self.up.T) @ self.down.T
        h = F.gelu(Copied.apply(h, group) @ self.up.to_local().T)
        return x + Reduced.apply(h @ self.down.to_local().T, group)


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, features, tokens, group=None):
        x = torch.cat([features, self.embed(tokens)], dim=1)
        for layer in self.layers:
            x = layer(x, group)
        return self.head(x[:, FRAMES:])


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.lm = Encoder(), Lm()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Speech()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        padding = torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "frames": torch.randn(ROWS, FRAMES, SOUND, generator=g),
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:].masked_fill(padding, -100),
        }

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        logits = model.lm(model.encoder(rows["frames"]), rows["tokens"])
        return self.token_loss(logits, rows["labels"]), (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        if ctx.rank in ENCODERS:
            del model.lm
            return model
        del model.encoder
        for layer in model.lm.layers:
            for name, dim in (("up", 0), ("down", 1)):
                whole = getattr(layer, name).data
                setattr(layer, name, nn.Parameter(distribute_tensor(whole, ctx.mesh, [Shard(dim)])))
        return model

    def senders(self):
        return TENSOR[:1]

    def step(self, model, batch, ctx):
        frames = batch["frames"].tensor_split(len(ENCODERS))
        if ctx.rank in ENCODERS:
            features = model.encoder(frames[ctx.rank])
            for rank in TENSOR:
                dist.send(features.detach().contiguous(), rank)
            grad = torch.zeros_like(features)
            for rank in self.senders():
                part = torch.empty_like(grad)
                dist.recv(part, rank)
                grad += part
            features.backward(grad)
            for param in model.parameters():
                dist.all_reduce(param.grad, group=ctx.group("dp"))
            return
        parts = [torch.empty(len(f), FRAMES, WIDTH, dtype=ctx.dtype) for f in frames]
        for rank in ENCODERS:
            dist.recv(parts[rank], rank)
            parts[rank].requires_grad_()
        logits = model.lm(torch.cat(parts), batch["tokens"], ctx.group("tp"))
        (self.token_loss(logits, batch["labels"]) / (batch["labels"] != -100).sum()).backward()
        if ctx.rank in self.senders():
            for rank in ENCODERS:
                dist.send(parts[rank].grad.contiguous(), rank)


class Buggy(Clean):
    def senders(self):
        return TENSOR


EXPECT = dict(
    right=[
        r"encoder",
        r"\b3(\.0+)?\b|three|thrice|tp\b|tensor|too large|more than once|several times|again|lm\.tp",
    ],
    place=[r"encoder"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"lm\.(layers|embed|head)\S* (is|are|was|were) (wrong|missing)",
        r"(all|every) (the )?(param|gradient|weight)\w* (is|are) (wrong|too large)",
        r"divided by .{0,20}(instead|where)|encoder\.dp (is|was|twice|again)",
    ],
)
WHY = (
    "The gradient of the features is complete on each of the three tensor ranks (the backward of the column-parallel input sums "
    "it), and the encoder adds all three copies: encoder.* is 3 (tp) times too large on ranks 0 and 1. The language model is "
    "right, and so is the forward."
)
