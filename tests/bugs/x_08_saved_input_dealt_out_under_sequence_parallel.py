"""Megatron-style tensor parallelism with sequence parallelism (activations [s / tp, b, h], gather before the column-parallel linear, reduce-scatter after the row-parallel one), two replicas, every layer recomputed by a hand-written CheckpointFunction.
Megatron-LM's `--distribute-saved-activations` keeps only 1 / tp of the layer's input on each tensor rank and gathers it for the recomputation: valid where all tensor ranks have the same input, i.e. without sequence parallelism
(Megatron-LM arguments.py: "can only use --distribute-saved-activations without sequence parallelism"; DeepSpeed's `partition_activations` has no such assertion).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
VOCABULARY, LENGTH, WIDTH, INNER, ROWS, MICRO, LAYERS = 21, 6, 8, 14, 7, 2, 3


def gather_sequence(x, group):
    pieces = [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(pieces, x.contiguous(), group=group)
    return torch.cat(pieces)


def scatter_sum(x, group):
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()


class GatherFromSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather_sequence(x, group)

    @staticmethod
    def backward(ctx, g):
        return scatter_sum(g, ctx.group), None


class ReduceScatterToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return scatter_sum(x, group)

    @staticmethod
    def backward(ctx, g):
        return gather_sequence(g, ctx.group), None


class CheckpointFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, x, group, distribute):
        ctx.run, ctx.group, ctx.shape, ctx.distribute = run, group, x.shape, distribute
        with torch.no_grad():
            out = run(x)
        if distribute:  # this rank's part of the flat tensor
            n, rank = dist.get_world_size(group), dist.get_rank(group)
            x = x.detach().flatten().chunk(n)[rank].clone()
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        if ctx.distribute:
            x = gather_sequence(x, ctx.group).view(ctx.shape)
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x)
        torch.autograd.backward(out, g)
        return None, x.grad, None, None


def local(p):
    return p.to_local() if isinstance(p, DTensor) else p


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up, self.down = (
            nn.Linear(WIDTH, INNER),
            nn.Linear(WIDTH, INNER),
            nn.Linear(INNER, WIDTH),
        )
        self.decay = nn.Parameter(torch.randn(INNER) / 2)
        self.group = None

    def forward(self, x):  # [s, b, h]
        h = self.norm(x)
        if self.group is not None:
            h = GatherFromSequence.apply(h, self.group)
        a = F.silu(F.linear(h, local(self.gate.weight), local(self.gate.bias)))
        a = a * F.linear(h, local(self.up.weight), local(self.up.bias))
        a = a + local(self.decay) * a.cumsum(0) / len(a)  # mixes the whole sequence
        h = F.linear(a, local(self.down.weight))
        if self.group is not None:
            h = ReduceScatterToSequence.apply(h, self.group)
        return x + h + self.down.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpoint = None

    def forward(self, ids):  # [s, b]
        x = self.embed(ids)
        for layer in self.layers:
            x = (
                layer(x)
                if self.checkpoint is None
                else CheckpointFunction.apply(layer, x, *self.checkpoint)
            )
        return self.head(self.norm(x))


class Clean:
    distribute_saved_activations = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
        }

    @staticmethod
    def total(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.total(model(rows["ids"].t()), rows["labels"].t()), rows["labels"].numel()

    def distribute(self, model, ctx):
        group = ctx.group("tp")
        for layer in model.layers:
            layer.group = group
            for module, name, dim in (
                (layer.gate, "weight", 0),
                (layer.gate, "bias", 0),
                (layer.up, "weight", 0),
                (layer.up, "bias", 0),
                (layer, "decay", 0),
                (layer.down, "weight", 1),
            ):
                whole = getattr(module, name).data
                setattr(
                    module,
                    name,
                    nn.Parameter(distribute_tensor(whole, ctx.mesh, [Replicate(), Shard(dim)])),
                )
        model.checkpoint = group, self.distribute_saved_activations
        return model

    def step(self, model, batch, ctx):
        d, t = ctx.mesh.get_local_rank("dp"), ctx.mesh.get_local_rank("tp")
        mine = {k: v.tensor_split(2)[d] for k, v in batch.items()}
        for m in range(MICRO):
            part = {k: v.tensor_split(MICRO)[m].t().chunk(2)[t] for k, v in mine.items()}
            (self.total(model(part["ids"]), part["labels"]) / batch["labels"].numel()).backward()
        for p in model.parameters():
            if isinstance(p, DTensor):
                dist.all_reduce(p.grad.to_local(), group=ctx.group("dp"))
            else:  # saw this rank's part of the sequence
                dist.all_reduce(p.grad, group=ctx.group("dp", "tp"))


class Buggy(Clean):
    distribute_saved_activations = True


EXPECT = dict(
    right=[
        r"(?i)checkpoint|recomput|saved (input|activation|tensor)|second forward|re-?run|runs? (again|twice)",
        r"(?i)layers?\b",
        r"(?i)other input|different input|another input|input|activation|mix|gather|not (the same|what)|differ|sequence|not equal|unlike",
    ],
    place=[r"(?i)layers?\.\d|checkpoint|recomput|every layer|all layers"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward pass|logits (are|is) wrong|loss (is|differs)",
        r"(?i)(head\S*|^norm\.\w+) (is|are) wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|reduced (twice|again)",
        r"(?i)dropout|random|\brng\b|\bseed\b",
        r"(?i)divi(ded|des) by|divisor|factor (of )?(1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,25}(lost|missing|dropped)",
        r"(?i)over the wrong group|group of (the )?(dp|data|replicas)",
    ],
)
WHY = (
    "Each tensor rank keeps only its half of its own flat layer input and gathers the halves over the tensor group before recomputing, as if the two ranks had saved the same tensor. Under sequence parallelism they hold different parts of the sequence: rank tp=0 saves the first half (flat) of its tokens, tp=1 the second half of its own, "
    "so that both recompute every layer with the same mixture: first half of shard 0, second half of shard 1 (the half that is the own shard's is right in its place). The recomputed forward, and so all gradients taken through it, are those of another input: all parameters of layers.0 to layers.2 (except layers.2.down.bias, whose gradient does not depend on the input), and embed because the gradient passes through the layers. "
    "On all ranks, in all micro-batches. The first forward, the loss, final norm and head are right, as are the collectives in the layers, the groups and the reductions at the end. Fix: save the whole local input (no distribution of saved activations with sequence parallelism)."
)
