"""Activation checkpointing that keeps 1/tp of a block's input on each tp rank and gathers it to recompute.
After FAULTS C15-08 (Megatron-LM issue 7452, finding 4): the saved parts are gathered over another group."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, TOKENS, FEATURES, WIDTH, INNER = 8, 3, 5, 6, 10


class ToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class FromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Checkpoint(torch.autograd.Function):
    """Runs a block without a graph; the backward gathers the input's parts and runs it again."""

    @staticmethod
    def forward(ctx, x, run, part, parts, group):
        ctx.run, ctx.parts, ctx.group, ctx.shape = run, parts, group, x.shape
        ctx.save_for_backward(x.detach().flatten().chunk(parts)[part].clone())
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, grad):
        (mine,) = ctx.saved_tensors
        parts = [torch.empty_like(mine) for _ in range(ctx.parts)]
        dist.all_gather(parts, mine, group=ctx.group)
        x = torch.cat(parts).view(ctx.shape).requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x)
        torch.autograd.backward(out, grad)
        return x.grad, None, None, None, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(TOKENS, TOKENS)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x, enter=lambda x: x, leave=lambda x: x):
        x = x + torch.tanh(self.mix(x.transpose(1, 2))).transpose(1, 2)
        return x + leave(self.down(F.gelu(self.up(enter(self.norm(x))))))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x, run=lambda block, x: block(x)):
        x = self.inputs(x)
        for block in self.blocks:
            x = run(block, x)
        return self.output(self.norm(x).mean(1))


CUT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


def cut_of(name):
    return CUT.get(".".join(name.split(".")[-2:]))


class Clean:
    gather_axis = "tp"

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Mixer()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, TOKENS, FEATURES, generator=g),
            "y": torch.randn(ROWS, 2, generator=g),
        }

    def loss_sum(self, model, rows, *run):
        return ((model(rows["x"], *run) - rows["y"]) ** 2).sum(), len(rows["y"])

    def shard_of(self, name, ctx):
        dim = cut_of(name)
        if dim is None:
            return None
        full = dict(self.build().named_parameters())[name]
        each = full.shape[dim] // ctx.axes["tp"]
        at = slice(each * ctx.coords["tp"], each * (ctx.coords["tp"] + 1))
        return tuple(at if i == dim else slice(0, n) for i, n in enumerate(full.shape))

    def distribute(self, model, ctx):
        for prefix, module in model.named_modules():
            for name, param in list(module.named_parameters(recurse=False)):
                dim = cut_of(f"{prefix}.{name}")
                if dim is not None:
                    part = param.detach().chunk(ctx.axes["tp"], dim=dim)[ctx.coords["tp"]]
                    setattr(module, name, nn.Parameter(part.clone()))
        return model

    def step(self, model, batch, ctx):
        tp = ctx.group("tp")
        gather = ctx.group(self.gather_axis)

        def run(block, x):
            def forward(x):
                return block(x, lambda y: ToRanks.apply(y, tp), lambda y: FromRanks.apply(y, tp))

            return Checkpoint.apply(x, forward, ctx.coords["tp"], ctx.axes["tp"], gather)

        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine, run)
        (loss / ROWS).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    gather_axis = "dp"


EXPECT = dict(
    right=[
        r"blocks?\b|recomput|checkpoint",
        (
            r"recomput|checkpoint|second (forward|run|pass)|(forward|run|called|computed) (again|twice|a second|in the backward)"
            r"|input.{0,60}(differ|other|not the|changed|unlike|not equal)|other (rows|input|activation|data)|backward"
            r"|gather|wrong group|mix"
        ),
    ],
    place=[r"blocks\.1", r"blocks\.\d", r"gather", r"recomput"],
    wrong=[
        r"gradients? of \S*(weight|bias)\S* (is|are|was) (not|never) (all-)?reduced|missing (all.?)?reduc",
        r"(reduced|counted|divided) (twice|again)",
        r"mean of (the )?means",
        r"(?<![\w.])(output|norm)\.\S+ (is|are) wrong",
        r"first forward (is|was) wrong|loss (is|was) wrong",
        r"rows? (is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "The parts of a block's saved input are gathered over dp instead of tp, so the recomputed forward of "
    "the blocks sees a mixture of two replicas' rows; the first forward is right, block gradients and all before are not."
)
