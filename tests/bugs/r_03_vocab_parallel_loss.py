"""Vocabulary-parallel head and cross-entropy over three tensor ranks with unequal parts of the vocabulary, a hand-written autograd.Function
for the loss, two micro-batches. After Megatron's vocab_parallel_cross_entropy and its target mask (FAULTS: shard_local_index_mask_or_statistic).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, LENGTH, WIDTH, VOCAB, MICRO = 5, 6, 10, 17, 2


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class VocabLoss(torch.autograd.Function):
    """Loss of each token; `start` is the first class that this rank has."""

    @staticmethod
    def forward(ctx, logits, labels, start, group, masked):
        top = logits.max(-1).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        logits = logits - top[:, None]
        foreign = (labels < start) | (labels >= start + logits.shape[-1])
        local = (labels - start).masked_fill(foreign, 0)
        hit = logits.gather(1, local[:, None])[:, 0].masked_fill(foreign, 0.0)
        dist.all_reduce(hit, group=group)
        exp = logits.exp()
        total = exp.sum(-1)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(exp / total[:, None], foreign, local)
        ctx.masked = masked
        return total.log() - hit

    @staticmethod
    def backward(ctx, grad):
        p, foreign, local = ctx.saved_tensors
        out, at = p.clone(), torch.arange(len(local))
        out[at, local] -= (~foreign).to(p.dtype) if ctx.masked else 1.0
        return out * grad[:, None], None, None, None, None


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.over = nn.LayerNorm(WIDTH), nn.Linear(LENGTH, LENGTH)
        self.up, self.down = nn.Linear(WIDTH, 21), nn.Linear(21, WIDTH)

    def forward(self, x):
        x = x + self.over(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mixers = nn.Sequential(Mixer(), Mixer())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def body(self, tokens):
        return self.norm(self.mixers(self.embed(tokens)))


class Clean:
    masked = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "tokens": torch.randint(VOCAB, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCAB, (ROWS, LENGTH), generator=g),
            "weight": torch.rand(ROWS, LENGTH, generator=g) + 0.2,
        }

    def loss_sum(self, model, rows):
        logits = model.head(model.body(rows["tokens"]))
        each = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="none")
        return (each * rows["weight"].flatten()).sum(), rows["labels"].numel()

    def distribute(self, model, ctx):
        part = model.head.weight.detach().tensor_split(ctx.axes["tp"])[ctx.coords["tp"]]
        model.head.weight = nn.Parameter(part.clone())
        return model

    def step(self, model, batch, ctx):
        group = ctx.group("tp")
        start = int(torch.arange(VOCAB).tensor_split(ctx.axes["tp"])[ctx.coords["tp"]][0])
        for rows in torch.arange(ROWS).tensor_split(MICRO):
            h = Copy.apply(model.body(batch["tokens"][rows]), group)
            labels = batch["labels"][rows].flatten()
            each = VocabLoss.apply(model.head(h).flatten(0, 1), labels, start, group, self.masked)
            loss = (each * batch["weight"][rows].flatten()).sum()
            (loss / batch["labels"].numel()).backward()


class Buggy(Clean):
    masked = False


EXPECT = dict(
    right=[r"backward|gradient|loss", r"head|logits|vocab|class|target|label|column|loss"],
    place=[r"head|loss|logits|vocab"],
    wrong=[
        r"forward (is|goes|was) wrong|goes wrong in the forward",
        r"(never|not) (been )?all.?reduced|missing (all.?)?reduc",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"backward of \S*(mixers?|over|up|down|norm)\S* is wrong",
        r"every (rank|micro-?batch) divides by its own",
    ],
)
WHY = (
    "Losses are right on all ranks. In the loss's own backward 1 is taken off at the masked label even where the label belongs to another rank's "
    "part of the vocabulary; the masked label is 0 there, so the first class of each part (classes 0, 6 and 12) gets the -1 of every token "
    "whose label lies elsewhere. The gradient of the logits is wrong in those three columns, with it those three rows of head.weight, and all of the body."
)
