"""A denoiser after EDM: a small U-Net of convolutions with preconditioning (c_skip, c_out, c_in,
c_noise). dp 2 x tp 2; the hidden channels of its two blocks (7 at the bottom, 5 at full size) are
cut over tp, the first convolution of a block by outputs and the second by inputs. Rows 5 in
micro-batches of two.

The objective weights the squared error of the denoised image by lambda(sigma). The step on the
ranks works on the raw network output instead: target (x - c_skip y) / c_out, and weight
lambda c_out^2.

Bug: the raw error is weighted by lambda. After rewrites of EDM training into "F-space", in which
the weight of the D-space loss was kept.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, SIDE, COLOURS, WIDTH, DATA = 5, 6, 2, 4, 0.5


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.first = nn.Conv2d(WIDTH, hidden, 3, padding=1)
        self.level = nn.Linear(3, hidden)
        self.second = nn.Conv2d(hidden, WIDTH, 3, padding=1, bias=False)
        self.bias = nn.Parameter(torch.randn(WIDTH) * 0.3)
        self.group = None

    def forward(self, x, e):
        if self.group is None:
            h, v = x, e
        else:
            h, v = Enter.apply(x, self.group), Enter.apply(e, self.group)
        h = self.second(F.silu(self.first(h) + self.level(v)[:, :, None, None]))
        h = h if self.group is None else Leave.apply(h, self.group)
        return x + h + self.bias[:, None, None]

    def cut(self, parts, own, group):
        def part(t, dim=0):
            return nn.Parameter(t.detach().tensor_split(parts, dim)[own].clone())

        self.first.weight, self.first.bias = part(self.first.weight), part(self.first.bias)
        self.level.weight, self.level.bias = part(self.level.weight), part(self.level.bias)
        self.second.weight = part(self.second.weight, 1)
        self.group = group


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(COLOURS, WIDTH, 3, padding=1)
        self.noise = nn.Linear(1, 3)
        self.bottom = Block(7)
        self.join = nn.Conv2d(2 * WIDTH, WIDTH, 1)
        self.top = Block(5)
        self.leave = nn.Conv2d(WIDTH, COLOURS, 3, padding=1)

    def forward(self, x, c_noise):
        e = torch.tanh(self.noise(c_noise[:, None]))
        x = self.enter(x)
        low = self.bottom(F.avg_pool2d(x, 2), e)
        low = F.interpolate(low, scale_factor=2, mode="nearest")
        return self.leave(F.silu(self.top(self.join(torch.cat([x, low], 1)), e)))


def preconditioning(sigma):
    both = sigma.square() + DATA**2
    return DATA**2 / both, sigma * DATA / both.sqrt(), both.rsqrt(), sigma.log() / 4


def per_row(values):
    return [v[:, None, None, None] for v in values]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 21)
        return UNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 211)
        image = torch.randn(ROWS, COLOURS, SIDE, SIDE, generator=g) * DATA
        sigma = (torch.randn(ROWS, generator=g) * 1.2 - 1.2).exp()
        return {"x": image, "sigma": sigma, "n": torch.randn(image.shape, generator=g)}

    def loss_sum(self, model, rows):
        x, sigma = rows["x"], rows["sigma"]
        c_skip, c_out, c_in, c_noise = preconditioning(sigma)
        c_skip, c_out, c_in, s = per_row([c_skip, c_out, c_in, sigma])
        y = x + s * rows["n"]
        denoised = c_skip * y + c_out * model(c_in * y, c_noise)
        lam = (s.square() + DATA**2) / (s * DATA).square()
        return (lam * (denoised - x).square()).sum(), x.numel()

    def weight(self, sigma, c_out):
        return (sigma.square() + DATA**2) / (sigma * DATA).square() * c_out.square()

    def raw_loss(self, model, rows):
        x, sigma = rows["x"], rows["sigma"]
        c_skip, c_out, c_in, c_noise = preconditioning(sigma)
        c_skip, c_out, c_in, s = per_row([c_skip, c_out, c_in, sigma])
        y = x + s * rows["n"]
        target = (x - c_skip * y) / c_out
        return (self.weight(s, c_out) * (model(c_in * y, c_noise) - target).square()).sum()

    def distribute(self, model, ctx):
        for block in (model.bottom, model.top):
            block.cut(ctx.axes["tp"], ctx.coords["tp"], ctx.group("tp"))
        return model

    def step(self, model, batch, ctx):
        rows = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in rows.split(2):
            loss = self.raw_loss(model, {k: v[part] for k, v in batch.items()})
            (loss / batch["x"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def weight(self, sigma, c_out):
        return (sigma.square() + DATA**2) / (sigma * DATA).square()


EXPECT = dict(
    right=[
        r"weight|lambda|\blam\b|factor|scal",
        r"c_out|sigma|noise level|raw|precondition|per.?(row|sample)|each row",
        r"loss|error|target|square",
    ],
    place=[r"\bweight\(", r"Buggy\.weight", r"raw_loss", r"self\.weight", r"lambda|\blam\b"],
    wrong=[
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"tensor.?parallel.{0,40}(missing|wrong|not)",
        r"uneven.{0,40}rows",
        r"(micro.?batch|rank).{0,30}mean of means",
        r"c_skip.{0,20}(wrong|missing)",
    ],
)
WHY = """The denoised image is c_skip y + c_out F, so its error is c_out times the error of F, and
lambda (D - x)^2 = lambda c_out^2 (F - target)^2; for EDM's lambda that product is one. Buggy.weight
leaves c_out^2 out and gives the raw error lambda, so every row counts 1 / c_out(sigma)^2 times as
much as it should, a factor of its own per row. Targets, reductions and shards are right. A right
cause says that the rows' weight misses c_out squared. Fix: weight times c_out.square()."""
