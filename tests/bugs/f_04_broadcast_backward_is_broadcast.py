"""Diffusion with the patches of an image cut over ranks. The prompt encoder runs on the first rank, its result is
broadcast; the denoiser is FSDP2. After FAULTS C07 (wrong adjoint of a collective) and the reports that
torch.distributed.broadcast has no backward (pytorch issue 58005's family): the backward broadcasts, too.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, PATCHES, CHANNELS, WIDTH, VOCAB = 7, 8, 5, 6, 12


class Broadcast(torch.autograd.Function):
    """From rank 0 to all; the gradient is the sum of all ranks', on rank 0."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.broadcast(x, 0)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class BroadcastBack(Broadcast):
    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.broadcast(grad, 0)
        return grad


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.time = nn.Linear(1, WIDTH)
        self.mix = nn.Sequential(nn.Linear(WIDTH, 9), nn.SiLU(), nn.Linear(9, WIDTH))

    def forward(self, prompt, t):
        return self.mix(self.words(prompt).mean(1) + self.time(t[:, None]))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.modulate = nn.Linear(WIDTH, 2 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)

    def forward(self, x, condition):
        shift, scale = self.modulate(condition)[:, None].chunk(2, dim=-1)
        return x + self.down(F.silu(self.up(self.norm(x) * (1 + scale) + shift)))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(CHANNELS, WIDTH)
        self.position = nn.Parameter(0.3 * torch.randn(PATCHES, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, CHANNELS)

    def forward(self, x, condition, positions):
        x = self.patch(x) + self.position[positions]
        for block in self.blocks:
            x = block(x, condition)
        return self.out(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.denoiser = Encoder(), Denoiser()


class Clean:
    broadcast = Broadcast

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        t = torch.rand(ROWS, generator=g)
        noise = torch.randn(ROWS, PATCHES, CHANNELS, generator=g)
        image = torch.randn(ROWS, PATCHES, CHANNELS, generator=g)
        a = (1 - t)[:, None, None]
        return {
            "prompt": torch.randint(VOCAB, (ROWS, 4), generator=g),
            "t": t,
            "noisy": a.sqrt() * image + (1 - a).sqrt() * noise,
            "noise": noise,
            "weight": torch.minimum((1 - t) / t, torch.tensor(5.0)),
        }

    @staticmethod
    def patch_loss(guess, noise, weight):
        return ((guess - noise).square().mean(-1) * weight[:, None]).sum()

    def loss_sum(self, model, rows):
        condition = model.encoder(rows["prompt"], rows["t"])
        guess = model.denoiser(rows["noisy"], condition, torch.arange(PATCHES))
        return self.patch_loss(guess, rows["noise"], rows["weight"]), len(guess) * PATCHES

    def distribute(self, model, ctx):
        for part in (*model.denoiser.blocks, model.denoiser):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def step(self, model, batch, ctx):
        positions = torch.arange(PATCHES).tensor_split(ctx.world_size)[ctx.rank]
        if ctx.rank == 0:
            own = model.encoder(batch["prompt"], batch["t"])
        else:
            own = batch["t"].new_zeros(ROWS, WIDTH).requires_grad_()
        condition = self.broadcast.apply(own)
        guess = model.denoiser(batch["noisy"][:, positions], condition, positions)
        loss = self.patch_loss(guess, batch["noise"][:, positions], batch["weight"])
        (loss / (ROWS * PATCHES)).backward()
        for param in model.encoder.parameters():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            dist.broadcast(param.grad, 0)


class Buggy(Clean):
    broadcast = BroadcastBack


EXPECT = dict(
    right=[
        r"encoder",
        r"missing|lack|partial|lost|own (part|share|patches|positions|gradient|slice)|only (the )?(rank 0|first rank|own|its|part)|"
        r"not (summed|reduced|added)|adjoint|backward of (the |a )?(broadcast|collective)|without .{0,30}(other|ranks)|"
        r"(other|remaining) ranks|ranks? \W?(1|2)\b.{0,60}(not|never|absent|zero|left out)|incomplete|no contribution|cross",
    ],
    place=[r"encoder", r"broadcast", r"ranks? \W?[012]\b"],
    wrong=[
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"counted (twice|three times|[23] times)|reduced (twice|again)",
        r"denoiser\S* (is|are|was|were) (wrong|missing|not reduced)",
        r"mean of (the )?(rank |ranks' )?means",
        r"FSDP .{0,30}(averag|divid)",
        r"micro-?batch",
    ],
)
WHY = (
    "The backward of the broadcast must sum the gradients of all three ranks' patches; it broadcasts rank 0's instead, so every "
    "parameter of the encoder has the gradient of the first rank's 3 of 8 patches only (on all ranks, equal). The denoiser is exact."
)
