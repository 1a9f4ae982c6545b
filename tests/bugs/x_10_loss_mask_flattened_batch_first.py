"""Megatron-style tensor parallelism (heads, MLP and vocabulary over two ranks, activations [s, b, h], vocabulary-parallel cross-entropy) with two replicas and micro-batches of several sequences; instruction tuning, the prompt and the padding are masked.
Per-token losses come as [s, b]; Megatron-LM's `compute_language_model_loss` ends with "[s b] => [b, s]: loss.transpose(0, 1).contiguous()", because `loss_func` does `losses.view(-1) * loss_mask.view(-1)` with the mask as [b, s]. Hand-written heads
(new model providers, fused cross-entropy replacements) leave that transpose out; everything fits as long as only the number of elements counts, and is right for a micro-batch size of 1 (compare NeMo PR 8345, "losses that were incorrect for micro_batch_size > 1").
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
VOCABULARY, LENGTH, WIDTH, HEADS, MICRO = 22, 7, 8, 2, 2
PROMPT, END = [3, 1, 2, 5, 0, 2, 4, 1, 3], [7, 4, 6, 7, 5, 3, 7, 6, 5]
ROWS = len(PROMPT)


class CopyToTensorRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(g, group=ctx.group)
        return g, None


class ReduceFromTensorRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


def local(p):
    return p.to_local() if isinstance(p, DTensor) else p


def linear(layer, x):
    return F.linear(x, local(layer.weight))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 18, bias=False), nn.Linear(18, WIDTH, bias=False)
        self.group = None

    def enter(self, x):
        return x if self.group is None else CopyToTensorRegion.apply(x, self.group)

    def leave(self, x):
        return x if self.group is None else ReduceFromTensorRegion.apply(x, self.group)

    def forward(self, x):  # [s, b, h]
        h = self.enter(self.norm(x))
        q, k, v = (
            linear(f, h).unflatten(-1, (-1, WIDTH // HEADS)).permute(1, 2, 0, 3)
            for f in (self.q, self.k, self.v)
        )
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        a = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -1e9).softmax(-1) @ v
        x = x + self.leave(linear(self.out, a.permute(2, 0, 1, 3).flatten(2)))
        return x + self.leave(linear(self.down, F.gelu(linear(self.up, self.enter(self.norm2(x))))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.group = None

    def forward(self, ids, labels):
        """ids and labels [b, s]; losses [s, b]."""
        x = self.embed(ids.t()) + self.place.weight[: ids.shape[1], None]
        for layer in self.layers:
            x = layer(x)
        x, labels = self.norm(x), labels.t()
        if self.group is None:
            return F.cross_entropy(
                self.head(x).flatten(0, 1), labels.flatten(), reduction="none"
            ).view_as(labels)
        logits = linear(self.head, CopyToTensorRegion.apply(x, self.group))
        top = logits.detach().amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        logits = logits - top[..., None]
        total = ReduceFromTensorRegion.apply(logits.exp().sum(-1), self.group)
        here = labels - dist.get_rank(self.group) * logits.shape[-1]
        mine = (here >= 0) & (here < logits.shape[-1])
        target = logits.gather(-1, here.where(mine, 0)[..., None])[..., 0] * mine
        return total.log() - ReduceFromTensorRegion.apply(target, self.group)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        at = torch.arange(LENGTH)
        mask = (at >= torch.tensor(PROMPT)[:, None]) & (at < torch.tensor(END)[:, None])
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "loss_mask": mask,
        }

    def loss_sum(self, model, rows):
        losses = model(rows["ids"], rows["labels"]).t()
        return (losses * rows["loss_mask"]).sum(), rows["loss_mask"].sum()

    def distribute(self, model, ctx):
        def put(module, dim):
            whole = module.weight.data
            module.weight = nn.Parameter(
                distribute_tensor(whole, ctx.mesh, [Replicate(), Shard(dim)])
            )

        model.group = ctx.group("tp")
        put(model.head, 0)
        for layer in model.layers:
            layer.group = model.group
            for f in (layer.q, layer.k, layer.v, layer.up):
                put(f, 0)
            for f in (layer.out, layer.down):
                put(f, 1)
        return model

    @staticmethod
    def flat(losses):
        """[s, b] to the order of the mask."""
        return losses.transpose(0, 1).contiguous().view(-1)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(2)[ctx.mesh.get_local_rank("dp")] for k, v in batch.items()}
        number = mine["loss_mask"].sum()
        dist.all_reduce(number, group=ctx.group("dp"))
        for m in range(MICRO):
            part = {k: v.tensor_split(MICRO)[m] for k, v in mine.items()}
            losses = self.flat(model(part["ids"], part["labels"]))
            ((losses * part["loss_mask"].reshape(-1)).sum() / number).backward()
        for p in model.parameters():
            dist.all_reduce(local(p.grad), group=ctx.group("dp"))


class Buggy(Clean):
    @staticmethod
    def flat(losses):
        return losses.reshape(-1)


EXPECT = dict(
    right=[
        r"(?i)mask|weight(s|ed)? (of|per) (the )?token|tokens? (weight|count)|which tokens|other tokens|wrong tokens|token",
        r"(?i)loss",
        r"(?i)order|layout|transpos|permut|other (tokens|positions|places)|wrong (tokens|positions|places)|mismatch|misalign|different tokens|masked (tokens|positions)|shuffl|batch.first|prompt|padding|not the (tokens|positions)|tokens? .{0,40}(should not|instead|outside)|another (token|position)",
    ],
    place=[r"(?i)loss|mask"],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|reduced (twice|again)",
        r"(?i)(divisor|denominator|number of tokens|count) (is|are) wrong|divides? by (its|their|the) own|divi(ded|des) by .{0,30}(instead|wrong)",
        r"(?i)backward of \S+ is wrong|cross.?entropy (is|goes) wrong|vocab\S* .{0,20}wrong",
        r"(?i)labels? (are|is) (wrong|shifted|transposed|permuted)|logits (are|is) wrong|layers?\.\d\S* (forward )?goes wrong",
        r"(?i)rows? .{0,20}(never read|read twice)|(micro.?batch|rank).{0,20}(lost|missing)",
        r"(?i)(same|plain|constant) factor|times too (large|small)",
    ],
)
WHY = (
    "The per-token losses are [s, b] and flattened in that order, the loss mask is [b, s] and flattened in its own order; without the transpose the mask of (row b, position s), flat index b*S + s, multiplies the loss that lies at this flat index in [s, b], i.e. of row (b*S + s) mod B at position (b*S + s) div B. The number of unmasked tokens and the divisor stay right, but other tokens enter the loss: prompt and padding positions "
    "instead of part of the answers. In every micro-batch with more than one sequence, i.e. in all of them here (dp 0: 3 and 2 rows; dp 1: 2 and 2), on all ranks, tensor ranks alike. Logits, labels, per-token losses, vocabulary-parallel cross-entropy, tensor-parallel collectives and the reduction over dp are right; all gradients of all parameters are wrong, in direction, not by a factor. "
    "Fix: losses.transpose(0, 1).contiguous() before view(-1)."
)
