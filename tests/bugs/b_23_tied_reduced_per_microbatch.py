"""A two-stage pipeline with a tied embedding: both stages sum its gradient after the micro-batches.
After Megatron reports: the embedding all-reduce moved into the accumulation loop."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 2}}}}
ROWS, LENGTH, WIDTH, VOCAB, MICRO = 8, 4, 8, 13, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + F.gelu(self.mlp(self.norm(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.final_norm = nn.LayerNorm(WIDTH)

    def forward(self, ids):
        x = self.word_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.final_norm(x) @ self.word_embeddings.weight.T


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=g)
        valid = torch.arange(LENGTH) < lengths
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(~valid, -100)}

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.token_loss(model(rows["ids"]), rows["labels"]), (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        half = len(model.layers) // 2
        parts = nn.ModuleDict({"word_embeddings": model.word_embeddings})
        if ctx.coords["pp"] == 0:
            parts["layers"] = nn.Sequential(*model.layers[:half])
        else:
            parts["layers"] = nn.Sequential(*model.layers[half:])
            parts["final_norm"] = model.final_norm
        return parts

    def step(self, model, batch, ctx):
        first, group = ctx.coords["pp"] == 0, ctx.group("pp")
        other = dist.get_global_rank(group, 1 - ctx.coords["pp"])
        mine = {k: v.chunk(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        count = (mine["labels"] != -100).sum()
        dist.all_reduce(count, group=ctx.group("dp"))
        micro = {k: v.chunk(MICRO) for k, v in mine.items()}
        for ids, labels in zip(micro["ids"], micro["labels"], strict=True):
            if first:
                out = model["layers"](model["word_embeddings"](ids))
                dist.send(out.detach(), other)
                grad = torch.empty_like(out)
                dist.recv(grad, other)
                out.backward(grad)
            else:
                x = torch.empty(*ids.shape, WIDTH, dtype=ctx.dtype)
                dist.recv(x, other)
                hidden = model["final_norm"](model["layers"](x.requires_grad_()))
                logits = hidden @ model["word_embeddings"].weight.T
                (self.token_loss(logits, labels) / count).backward()
                dist.send(x.grad, other)
            self.after_microbatch(model, group)
        self.after_step(model, group)
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))

    def after_microbatch(self, model, group):
        pass

    def after_step(self, model, group):
        dist.all_reduce(model["word_embeddings"].weight.grad, group=group)


class Buggy(Clean):
    def after_microbatch(self, model, group):
        dist.all_reduce(model["word_embeddings"].weight.grad, group=group)

    def after_step(self, model, group):
        pass


EXPECT = dict(
    right=[
        r"word_embeddings",
        r"counted (twice|2 times|too often)|twice|2 times|times 2|x ?2|double|repeat|again|2\.0"
        r"|already (reduced|summed)|reduced? \d times",
    ],
    place=[r"word_embeddings", r"micro.?batch(es)? ?[01]", r"\bpp\b"],
    wrong=[r"never reduced|not reduced|missing reduction", r"averag", r"\bforward (is )?wrong"],
)
WHY = (
    "The tied weight's accumulated gradient is summed over pp after each micro-batch, so what the "
    "first micro-batch gave is counted twice; other parameters are right."
)
