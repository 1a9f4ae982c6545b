"""Megatron-like MLPs with tensor and sequence parallelism. The sequence is gathered into one global memory buffer in
front of each column-parallel layer, and gathered again in its backward. After Megatron-LM's get_global_memory_buffer
and FAULTS C13 (buffers recycled early): the backward trusts the buffer and leaves out the second gather.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, LENGTH, WIDTH, HIDDEN, VOCAB, MICRO_BATCHES = 5, 9, 6, 11, 13, 2
MEMORY = {}


def gather_sequence(x):
    """All ranks' positions, in a buffer that all layers share."""
    n = dist.get_world_size()
    shape = n, *x.shape
    if (shape, x.dtype) not in MEMORY:
        MEMORY[shape, x.dtype] = x.new_empty(shape)
    buffer = MEMORY[shape, x.dtype]
    dist.all_gather(list(buffer.unbind(0)), x.contiguous())
    return buffer


class GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, again):
        ctx.save_for_backward(x, weight)
        ctx.again, ctx.total = again, gather_sequence(x)
        y = F.linear(ctx.total, weight, bias)
        return torch.cat(list(y), dim=1)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        total = gather_sequence(x) if ctx.again else ctx.total
        grad = torch.stack(grad.chunk(len(total), dim=1))
        back = grad @ weight
        dist.all_reduce(back)
        rows = grad.flatten(0, -2)
        return (back[dist.get_rank()], rows.T @ total.flatten(0, -2), rows.sum(0), None)


class Scattered(torch.autograd.Function):
    """Summed over ranks, and each keeps its positions."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx, grad):
        parts = [
            torch.empty_like(grad, memory_format=torch.contiguous_format)
            for _ in range(dist.get_world_size())
        ]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts, dim=1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.column, self.row = (lambda x, m: m(x)), (lambda x: x)

    def forward(self, x):
        return x + self.row(self.down(F.gelu(self.column(self.norm(x), self.up))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Clean:
    again = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"]).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum")
        return loss, (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        def cut(param, dim):
            return nn.Parameter(param.detach().tensor_split(ctx.world_size, dim)[ctx.rank].clone())

        for layer in model.layers:
            layer.up.weight, layer.up.bias = cut(layer.up.weight, 0), cut(layer.up.bias, 0)
            layer.down.weight = cut(layer.down.weight, 1)
            layer.column = lambda x, m: GatheredLinear.apply(x, m.weight, m.bias, self.again)
            layer.row = Scattered.apply
        return model

    def step(self, model, batch, ctx):
        total = (batch["labels"] != -100).sum()
        for i in range(MICRO_BATCHES):
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in batch.items()}
            micro = {k: v.chunk(ctx.world_size, dim=1)[ctx.rank] for k, v in micro.items()}
            (self.loss_sum(model, micro)[0] / total).backward()
        for name, param in model.named_parameters():
            if ".up." not in name and ".down." not in name:
                dist.all_reduce(param.grad)


class Buggy(Clean):
    again = False


EXPECT = dict(
    right=[
        r"up\.weight|layers\.[01]\.up|\bup\b",
        r"stale|overwrit|buffer|other (layer|input)|another layer|last layer|later layer|wrong (input|activation|saved)|saved|activation|"
        r"recomput|weight gradient|direction|backward (of|in|at)|own backward|not the (input|activation)|input (of|to)|adjoint|only the weight",
    ],
    place=[
        r"layers\.[01]",
        r"up\.weight",
        r"(all|every|each) ranks?|ranks? \W?[012]",
        r"buffer|gather",
    ],
    wrong=[
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"layers\.2\S* (is|are|was|were) wrong",
        r"(norm|embed|head|down)\S* (is|are|was|were) (wrong|missing|(not|never) (reduced|summed))",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "All layers gather into one buffer; at the time of the backward it holds the input of layers.2.up. The weight gradients of layers.0.up "
    "and layers.1.up are formed with that input instead of their own (wrong direction, on all ranks); layers.2.up.weight, all biases and all other "
    "parameters are exact, as is the forward."
)
