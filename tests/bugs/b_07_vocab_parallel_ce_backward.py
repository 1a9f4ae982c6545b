"""Megatron's vocabulary-parallel cross entropy as one autograd function with its own backward.
After reports on hand-written parallel cross entropy kernels (FAULTS class C19)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, LENGTH, WIDTH, VOCAB = 5, 6, 8, 24


class CopyIn(torch.autograd.Function):
    """Identity forward, SUM over the group backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOut(torch.autograd.Function):
    """SUM over the group forward, identity backward."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, start, group, masked):
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        exp = (logits - largest[:, None]).exp()
        outside = (labels < start) | (labels >= start + logits.shape[1])
        index = (labels - start).masked_fill(outside, 0)
        rows = torch.arange(len(labels))
        chosen = (logits[rows, index] - largest).masked_fill(outside, 0.0)
        total = exp.sum(-1)
        dist.all_reduce(chosen, group=group)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(exp / total[:, None], outside, index)
        ctx.masked = masked
        return total.log() - chosen

    @staticmethod
    def backward(ctx, grad):
        softmax, outside, index = ctx.saved_tensors
        out, rows = softmax.clone(), torch.arange(len(index))
        out[rows, index] -= 1.0 - outside.to(out.dtype) if ctx.masked else 1.0
        return out * grad[:, None], None, None, None, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.final_norm = nn.LayerNorm(WIDTH)
        self.output_layer = nn.Linear(WIDTH, VOCAB, bias=False)

    def hidden(self, ids):
        return self.final_norm(self.blocks(self.embed(ids)))

    def forward(self, ids):
        return self.output_layer(self.hidden(ids))


class Clean:
    masked = True

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
        self.kept = VOCAB // ctx.axes["tp"]
        self.start = self.kept * ctx.coords["tp"]
        weight = model.output_layer.weight[self.start : self.start + self.kept]
        model.output_layer.weight = nn.Parameter(weight.detach().clone())
        return model

    def step(self, model, batch, ctx):
        group, labels = ctx.group("tp"), batch["labels"].flatten()
        valid = labels != -100
        hidden = CopyIn.apply(model.hidden(batch["ids"]), group)
        logits = model.output_layer(hidden).flatten(0, 1)
        loss = ParallelCrossEntropy.apply(
            logits, labels.masked_fill(~valid, 0), self.start, group, self.masked
        )
        ((loss * valid).sum() / valid.sum()).backward()


class Buggy(Clean):
    masked = False


EXPECT = dict(
    right=[
        r"output_layer|loss|logits|cross.?entropy",
        r"loss (itself|differs|value|function|is (wrong|another|computed)|term)"
        r"|(outside|after|behind|above) (the |every )?(last )?(model|module|output_layer)|enters"
        r"|arrives"
        r"|(into|at|of) (the )?(output|logits|output_layer)|other weights? (of|for)|weighs|weighted"
        r"|backward|rows? (0|8|16)\b",
    ],
    place=[r"output_layer", r"loss|cross.?entropy", r"rows? (0|8|16)\b"],
    wrong=[r"forward (is )?wrong", r"averag", r"counted twice"],
)
WHY = (
    "The backward of the cross entropy subtracts one at local index 0 also for labels that lie on "
    "another rank: rows 0, 8, 16 of output_layer and the hidden gradient are wrong."
)
