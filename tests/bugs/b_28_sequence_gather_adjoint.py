"""Megatron sequence parallelism by hand: gather before the column-parallel layer, reduce-scatter
after the row-parallel. After a Megatron report on tensor_parallel_output_grad=False."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, LENGTH, WIDTH, HIDDEN, VOCAB = 5, 6, 8, 12, 14


def summed_part(x, group):
    """Reduce-scatter along the sequence."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return own_part(x, group)


def own_part(x, group):
    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()


def whole(x, group):
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts, dim=1)


class GatherFromSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, tensor_parallel_output_grad):
        ctx.kept = group, tensor_parallel_output_grad
        return whole(x, group)

    @staticmethod
    def backward(ctx, grad):
        group, tensor_parallel_output_grad = ctx.kept
        back = summed_part if tensor_parallel_output_grad else own_part
        return back(grad, group), None, None


class ReduceScatterToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return summed_part(x, group)

    @staticmethod
    def backward(ctx, grad):
        return whole(grad, ctx.group), None


class Layer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.dense_h_to_4h = nn.Linear(WIDTH, hidden)
        self.dense_4h_to_h = nn.Linear(hidden, WIDTH, bias=False)


class Model(nn.Module):
    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)


class Clean:
    tensor_parallel_output_grad = True

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
        logits = self.forward(model, rows["ids"])
        return self.token_loss(logits, rows["labels"]), (rows["labels"] != -100).sum()

    def forward(self, model, ids, group=None):
        x = model.embed(ids)
        for layer in model.layers:
            y = layer.norm(x)
            if group is not None:
                y = GatherFromSequence.apply(y, group, self.tensor_parallel_output_grad)
            y = layer.dense_4h_to_h(F.gelu(layer.dense_h_to_4h(y)))
            x = x + (y if group is None else ReduceScatterToSequence.apply(y, group))
        return model.head(model.norm(x))

    def distribute(self, model, ctx):
        tp, at = ctx.axes["tp"], ctx.coords["tp"]
        local, state = Model(HIDDEN // tp).to(ctx.dtype), model.state_dict()
        for name in state:
            if "dense" in name:
                state[name] = state[name].chunk(tp, dim=int("4h_to_h" in name))[at]
        local.load_state_dict(state)
        return local

    def step(self, model, batch, ctx):
        group = ctx.group("tp")
        ids, labels = (own_part(batch[k], group) for k in ("ids", "labels"))
        logits = self.forward(model, ids, group)
        (self.token_loss(logits, labels) / (batch["labels"] != -100).sum()).backward()
        for name, param in model.named_parameters():
            if "dense" not in name:
                dist.all_reduce(param.grad, group=group)


class Buggy(Clean):
    tensor_parallel_output_grad = False


EXPECT = dict(
    right=[
        r"backward|gradient.*(lost|not (summed|reduced))|adjoint|own part|partial",
        r"norm|dense_h_to_4h|layers\.[01]|all_?gather|embed",
    ],
    place=[r"layers\.[01]\.norm", r"layers\.1", r"dense_h_to_4h", r"all_?gather"],
    wrong=[r"averag", r"counted (twice|3 times)", r"\bforward (is )?wrong"],
)
WHY = (
    "The backward of the sequence gather takes its own part instead of a reduce-scatter: what the "
    "other ranks' columns say of a position is lost, from layers.1.norm downward."
)
