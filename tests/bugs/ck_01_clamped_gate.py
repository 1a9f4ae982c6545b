"""A gpt-oss-like feed-forward stack, tensor parallel over two ranks: gate and up are cut by
inner channels (7: 4 and 3), down is row parallel. The activation is a fused Function that
clamps the gate from above only, the up branch on both sides, and returns (up + 1) * gate *
sigmoid(1.702 gate).

Bug: the fused backward uses the two-sided mask of the up branch for the gate as well. After the
hand-written kernels of clamped SwiGLU (`clamp(max=limit)` on the gate, `clamp(-limit, limit)`
on the linear part) in gpt-oss ports.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 2}}}}
WIDTH, INNER, ROWS, LIMIT, ALPHA = 5, 7, 9, 0.6, 1.702


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class ClampedGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        a, b = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return (b + 1) * a * torch.sigmoid(ALPHA * a)

    @staticmethod
    def backward(ctx, g):
        gate, up = ctx.saved_tensors
        a, b = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        s = torch.sigmoid(ALPHA * a)
        d_gate = g * (b + 1) * s * (1 + ALPHA * a * (1 - s))
        d_up = g * a * s
        return d_gate * (gate <= LIMIT), d_up * (up.abs() <= LIMIT)


class FastClampedGlu(ClampedGlu):
    @staticmethod
    def backward(ctx, g):
        gate, up = ctx.saved_tensors
        a, b = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        s = torch.sigmoid(ALPHA * a)
        inside = torch.stack([gate, up]).abs() <= LIMIT
        d_gate = g * (b + 1) * s * (1 + ALPHA * a * (1 - s))
        d_up = g * a * s
        return d_gate * inside[0], d_up * inside[1]


class FeedForward(nn.Module):
    glu = group = None

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, INNER)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        if self.group is None:
            a, b = self.gate(h).clamp(max=LIMIT), self.up(h).clamp(-LIMIT, LIMIT)
            return x + self.down((b + 1) * a * torch.sigmoid(ALPHA * a))
        h = Copy.apply(h, self.group)
        y = self.glu.apply(self.gate(h), self.up(h)) @ self.down.weight.T
        return x + Reduce.apply(y, self.group) + self.down.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.layers = nn.Sequential(FeedForward(), FeedForward())
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.head(self.layers(self.embed(x)))


class Clean:
    glu = ClampedGlu

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 5)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 50)
        return {"x": torch.randn(ROWS, 3, generator=g), "y": torch.randn(ROWS, 2, generator=g)}

    def loss_sum(self, model, rows):
        return (model(rows["x"]) - rows["y"]).square().sum(), rows["x"].shape[0]

    def distribute(self, model, ctx):
        group = ctx.group("tp")
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        own = torch.arange(INNER).tensor_split(world)[rank]
        for layer in model.layers:
            layer.group, layer.glu = group, self.glu
            for linear in (layer.gate, layer.up):
                linear.weight = nn.Parameter(linear.weight.detach()[own].clone())
                linear.bias = nn.Parameter(linear.bias.detach()[own].clone())
            layer.down.weight = nn.Parameter(layer.down.weight.detach()[:, own].clone())
        return model

    def step(self, model, batch, ctx):
        for lo in range(0, ROWS, 4):
            out = model(batch["x"][lo : lo + 4])
            ((out - batch["y"][lo : lo + 4]).square().sum() / ROWS).backward()


class Buggy(Clean):
    glu = FastClampedGlu


EXPECT = dict(
    right=[
        r"gate",
        r"clamp|clip|limit|saturat|mask|inside",
        (
            r"below|lower|negative|two.?sided|both sides|one.?sided|symmetric|\babs\b|-\s?limit"
            r"|from above|only (the )?(upper|max)|less than|< ?-"
        ),
    ],
    place=[r"FastClampedGlu", r"ClampedGlu|\bglu\b", r"inside", r"gate\.(weight|bias)", "d_gate"],
    wrong=[
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"bias.{0,40}(twice|divided|each rank)",
        r"sigmoid.{0,30}derivative (is )?(wrong|missing)",
        r"micro.?batch\w* (count|divis|weight)",
        r"up (branch|projection).{0,30}(wrong|not clamped)",
    ],
)
WHY = (
    "The activation clamps the gate only from above (max=LIMIT) and the up branch on both "
    "sides. FastClampedGlu.backward makes one mask abs() <= LIMIT for both, so gate values "
    "below -LIMIT, which the forward does not clamp, get gradient zero. Wrong are gate.weight"
    " and gate.bias of every layer and, through the input gradient, norms and everything "
    "earlier (embed, first layer); the last layer's up and down and the head are right. A "
    "right cause says that the backward treats the gate's one-sided clamp as two-sided (zero "
    "gradient for very negative gates). Fix: mask the gate with gate <= LIMIT."
)
