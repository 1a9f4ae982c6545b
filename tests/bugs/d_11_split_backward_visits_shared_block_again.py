"""Zero-bubble pipeline: the backward is split in an input and a weight phase; a block is applied three
times. After FAULTS C11-07 (pytorch PR 181365): the weight phase goes through each intermediate down
to the ancestors, so a shared weight's earlier uses come again.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2}}}}

ROWS, LENGTH, WIDTH, VOCABULARY, LOOPS = 10, 5, 8, 12, 3


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.shift = nn.Conv1d(WIDTH, WIDTH, 2, groups=WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        y = self.shift(F.pad(self.norm(x).transpose(1, 2), (1, 0))).transpose(1, 2)
        return x + self.down(F.silu(self.up(y)))


class Output(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        return self.linear(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.core = nn.Embedding(VOCABULARY, WIDTH), Block(11)
        self.last, self.output = Block(9), Output()

    def forward(self, x):
        x = self.embed(x)
        for _ in range(LOOPS):
            x = self.core(x)
        return self.output(self.last(x))


class Stage:
    """One micro-batch on one stage, with its backward in two phases."""

    def __init__(self, layers, cut):
        self.layers, self.cut = layers, cut

    def forward(self, x):
        self.inputs, self.outputs = [], []
        for layer in self.layers:
            if x.is_floating_point():
                x = self.cut(x)
            self.inputs.append(x)
            x = layer(x)
            self.outputs.append(x)
        return x

    def backward_input(self, grad):
        self.grads = [None] * len(self.layers)
        for i in reversed(range(len(self.layers))):
            self.grads[i] = grad
            if self.inputs[i].is_floating_point():
                grad = torch.autograd.grad(
                    self.outputs[i], self.inputs[i], grad, retain_graph=True
                )[0]
        return grad

    def backward_weight(self):
        for layer, out, grad in zip(self.layers, self.outputs, self.grads):
            params = list(layer.parameters())
            for param, g in zip(params, torch.autograd.grad(out, params, grad, retain_graph=True)):
                param.grad = g if param.grad is None else param.grad + g


def cut(x):
    return x.detach().requires_grad_()


class Clean:
    num_microbatches = 2

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
        }

    @staticmethod
    def cross_entropy(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.cross_entropy(model(rows["ids"]), rows["labels"]), rows["labels"].numel()

    def distribute(self, model, ctx):
        names = (("embed", "core"), ("last", "output"))[ctx.coords["pp"]]
        return nn.ModuleDict({name: getattr(model, name) for name in names})

    def between(self, x):
        return cut(x)

    def step(self, model, batch, ctx):
        first, second = dist.get_process_group_ranks(ctx.group("pp"))
        stages = []
        for i in range(self.num_microbatches):
            rows = {k: v.tensor_split(self.num_microbatches)[i] for k, v in batch.items()}
            shape = len(rows["ids"]), LENGTH, WIDTH
            if ctx.coords["pp"] == 0:
                stage = Stage([model["embed"], *[model["core"]] * LOOPS], self.between)
                dist.send(stage.forward(rows["ids"]).detach(), second)
                grad = torch.empty(shape, dtype=ctx.dtype)
                dist.recv(grad, second)
                stage.backward_input(grad)
            else:
                x = torch.empty(shape, dtype=ctx.dtype)
                dist.recv(x, first)
                stage = Stage([model["last"], model["output"]], self.between)
                logits = stage.forward(cut(x))
                loss = self.cross_entropy(logits, rows["labels"]) / (ROWS * LENGTH)
                grad = torch.autograd.grad(loss, logits, retain_graph=True)[0]
                dist.send(stage.backward_input(grad), first)
            stages.append(stage)
        for stage in stages:
            stage.backward_weight()


class Buggy(Clean):
    def between(self, x):
        return x


EXPECT = dict(
    right=[
        r"\bcore\b",
        r"shared|uses?|calls?|applied|applications?|applies|invocation|loops?|counted|again|more than once|several times"
        r"|repeated|too (large|big|often)|twice|three times|weight phase|parameter|visit|double",
    ],
    place=[r"\bcore\b"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"averag|mean of (the )?means",
        r"\b(last|output|embed)\.\w\S* (is|has) (wrong|counted|too)",
        r"\bforward (is )?wrong",
        r"rows? .{0,30}(lost|missing|dropped)",
    ],
)

WHY = (
    "The weight phase differentiates each output of core down to the earlier uses of the same "
    "weights: the first use counts three times, the second twice, the third once; only core is "
    "wrong."
)
