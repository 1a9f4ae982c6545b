"""A residual MLP on two pipeline stages of two tensor-parallel ranks. What a stage hands over is the same on both tensor ranks, so each of them sends its half of the columns to its partner in the next stage only, which gathers the halves over the tensor group (Megatron's
scatter-gather tensors in pipeline); so does the gradient on its way back. Three micro-batches, all forwards before all backwards; loss over the number of rows.

The bug: the first stage doesn't gather the gradient's halves: each tensor rank puts the half it received at its columns and leaves the rest zero. After Megatron-LM's --scatter-gather-tensors-in-pipeline and ports of it whose recv_backward lacks the gather.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2, "tp": 2}}}}
ROWS, FEATURES, WIDTH, HIDDEN, OUT, MICRO = 8, 5, 6, 10, 3, 3


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.bias = nn.Parameter(0.1 * torch.randn(WIDTH))
        self.group = None

    def forward(self, x):
        y = self.norm(x)
        if self.group is not None:
            y = Copy.apply(y, self.group)
        y = self.down(torch.tanh(self.up(y)))
        if self.group is not None:
            y = Reduce.apply(y, self.group)
        return x + y + self.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Mlp() for _ in range(4))
        self.leave = nn.Linear(WIDTH, OUT)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FEATURES, generator=g),
            "y": torch.randn(ROWS, OUT, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["x"]) - rows["y"]).square().sum(), len(rows["x"])

    def distribute(self, model, ctx):
        stage, lane, group = ctx.coords["pp"], ctx.coords["tp"], ctx.group("tp")
        half = HIDDEN // 2
        mine = slice(lane * half, (lane + 1) * half)
        for i, block in enumerate(model.blocks):
            if i // 2 != stage:
                model.blocks[i] = nn.Identity()
                continue
            block.group = group
            block.up.weight = nn.Parameter(block.up.weight.detach()[mine].clone())
            block.up.bias = nn.Parameter(block.up.bias.detach()[mine].clone())
            block.down.weight = nn.Parameter(block.down.weight.detach()[:, mine].clone())
        if stage == 0:
            model.leave = nn.Identity()
        else:
            model.enter = nn.Identity()
        return model

    @staticmethod
    def columns(ctx):
        half = WIDTH // 2
        return slice(ctx.coords["tp"] * half, (ctx.coords["tp"] + 1) * half)

    def partner(self, ctx):
        return (ctx.rank + 2) % 4  # ranks run over tp first

    def send(self, x, ctx):
        dist.send(x[:, self.columns(ctx)].contiguous(), self.partner(ctx))

    def recv_half(self, like, ctx):
        half = like.new_empty(len(like), WIDTH // 2)
        dist.recv(half, self.partner(ctx))
        return half

    def gather_halves(self, half, ctx):
        parts = [torch.empty_like(half) for _ in range(2)]
        dist.all_gather(parts, half, group=ctx.group("tp"))
        return torch.cat(parts, 1)

    def recv_forward(self, like, ctx):
        return self.gather_halves(self.recv_half(like, ctx), ctx).requires_grad_()

    def recv_backward(self, like, ctx):
        return self.gather_halves(self.recv_half(like, ctx), ctx)

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        kept = []
        for n in range(MICRO):
            part = {k: v.tensor_split(MICRO)[n] for k, v in batch.items()}
            if ctx.coords["pp"] == 0:
                out = model(part["x"])
                self.send(out.detach(), ctx)
                kept.append(out)
            else:
                x = self.recv_forward(part["x"], ctx)
                kept.append((x, (model(x) - part["y"]).square().sum() / ROWS))
        for n in range(MICRO):
            if ctx.coords["pp"] == 0:
                kept[n].backward(self.recv_backward(kept[n], ctx))
            else:
                x, loss = kept[n]
                loss.backward()
                self.send(x.grad, ctx)


class Buggy(Clean):
    def recv_backward(self, like, ctx):
        grad = torch.zeros_like(like)
        grad[:, self.columns(ctx)] = self.recv_half(like, ctx)
        return grad


EXPECT = dict(
    right=[
        r"gather|half|halves|column|slice|part of|partial|zero|incomplete|not (summed|reduced|joined)|other tensor rank|tp",
        r"gradient|backward|grad\b|way back|recv_backward",
        r"missing|lack|zero|only|without|not |never|lost|drop|differ|incomplete|partial|unequal|unlike",
    ],
    place=[
        r"recv_backward",
        r"recv_half|gather_halves|all_gather",
        r"stage (0|zero)|first stage|pp.{0,6}0|blocks\.(0|1)|enter",
        r"columns|halves|half|kept",
    ],
    wrong=[
        r"wrong (partner|peer|rank)|order of the (halves|micro.?batches)|last micro.?batch|overwritten",
        r"Copy.{0,30}(missing|wrong)|Reduce.{0,30}(backward|twice)|norm.{0,30}not (reduced|summed)",
        r"divisor|own count|mean of means|reduced twice",
        r"forward.{0,20}(is )?(wrong|differs)|second stage.{0,20}wrong",
    ],
)
WHY = (
    "In the first stage each tensor rank starts backward with the half of the gradient's columns that its partner sent and zeros elsewhere; the halves aren't gathered over the tensor group. All parameters of stage 0 (enter, blocks 0 and 1) get wrong gradients on both tensor ranks in all three micro-batches, and the "
    "replicated ones (enter, norms, biases) unlike ones; stage 1 and the forward are right. A right cause says that the gradient that stage 0 receives lacks the other tensor rank's columns (missing gather on the way back). Fix: gather the halves in recv_backward as in recv_forward."
)
