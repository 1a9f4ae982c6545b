"""An image encoder on one pool (rows over `dp`) and a tensor-parallel text model on another, which every encoder rank sends its features
to and receives gradients from. After Megatron-Bridge's MIMO and DistTrain-like disaggregated encoders (FAULTS C03-07) and C06 (a complete
gradient counted once per holder): the encoder adds up what comes back from all tensor ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"vision": {"axes": {"dp": 3}}, "text": {"axes": {"tp": 2}}}}
ROWS, PIXELS, LENGTH, WORDS, WIDTH = 10, 7, 4, 13, 8


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
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
        self.enter, self.norm, self.out = nn.Linear(PIXELS, 9), nn.LayerNorm(9), nn.Linear(9, WIDTH)

    def forward(self, x):
        return self.out(F.gelu(self.norm(self.enter(x))))


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, image, words, copy=lambda x: x, total=lambda x: x):
        x = torch.cat([image[:, None], self.words(words)], 1)
        x = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        x = x + total(self.down(F.silu(self.up(copy(self.norm(x))))))
        return self.head(x[:, 1:])


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision, self.text = Encoder(), Text()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Both()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        words = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "image": torch.randn(ROWS, PIXELS, generator=g),
            "words": words[:, :-1],
            "next": words[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    @staticmethod
    def token_loss(logits, rows):
        return F.cross_entropy(logits.flatten(0, 1), rows["next"].flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        logits = model.text(model.vision(rows["image"]), rows["words"])
        return self.token_loss(logits, rows), (rows["next"] != -100).sum()

    def distribute(self, model, ctx):
        if ctx.pool == "vision":
            del model.text
            return model
        del model.vision
        part = ctx.coords["tp"]
        for module, name, dim in (
            (model.text.up, "weight", 0),
            (model.text.up, "bias", 0),
            (model.text.down, "weight", 1),
        ):
            setattr(
                module,
                name,
                nn.Parameter(getattr(module, name).detach().chunk(2, dim)[part].clone()),
            )
        return model

    def from_text(self, gradients):
        """Every tensor rank holds the whole gradient of the features."""
        return gradients[0]

    def step(self, model, batch, ctx):
        encoders, texts = ctx.pools["vision"], ctx.pools["text"]
        if ctx.pool == "vision":
            mine = batch["image"].tensor_split(len(encoders))[ctx.pool_rank]
            features, gradients = model.vision(mine), []
            for text in texts:
                dist.send(features.detach(), text)
            for text in texts:
                gradients.append(torch.empty_like(features))
                dist.recv(gradients[-1], text)
            features.backward(self.from_text(gradients))
            for param in model.parameters():
                dist.all_reduce(param.grad, group=ctx.group("dp"))
            return
        received = []
        for rows, encoder in zip(batch["image"].tensor_split(len(encoders)), encoders):
            received.append(torch.empty(len(rows), WIDTH, dtype=ctx.dtype))
            dist.recv(received[-1], encoder)
        features, group = torch.cat(received).requires_grad_(), ctx.group("tp")
        logits = model.text(
            features, batch["words"], lambda x: Copy.apply(x, group), lambda x: Sum.apply(x, group)
        )
        (self.token_loss(logits, batch) / (batch["next"] != -100).sum()).backward()
        for piece, encoder in zip(features.grad.tensor_split(len(encoders)), encoders):
            dist.send(piece.contiguous(), encoder)


class Buggy(Clean):
    def from_text(self, gradients):
        return sum(gradients)


EXPECT = dict(
    right=[r"vision", r"\b2(\.0*)?\b|two|twice|double|tp\b|too (large|big)"],
    place=[r"vision", r"ranks? \W?[012]"],
    wrong=[
        r"text\.\S* (is|are|was|were|has|have) (a )?(wrong|missing|too)",
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"(vision\.dp|dp of the encoder|\bdp\b) .{0,30}(instead|wrong|again|twice)",
        r"micro-?batch(es)? .{0,20}(twice|lost|missing|dropped)",
    ],
)
WHY = (
    "Both tensor ranks of the text pool hold the whole gradient of the image features, and the encoder adds the two, so vision.* is "
    "exactly twice (the size of text.tp) what it should be, on the three encoder ranks. The text model's gradients and the forward "
    "are right."
)
