"""Frame classifier for speech (a small Conformer-like net) on three ranks, two micro-batches each, gradients summed by hand. The depthwise convolution over time is a hand-written autograd Function with "same" padding and a kernel of 5. The
loss is summed over valid frames and divided by their number in the whole batch.

The bug: the Function's input gradient correlates the output gradient with the kernel as it stands, in place of the kernel turned round in time; with a symmetric kernel one would not see it. As in rasmusbergpalm/DeepLearnToolbox issue 41
(the kernel of the backward needs another flip) and ddbourgin/numpy-ml issue 27 (must the weights be rotated in the backward?).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, FRAMES, MELS, WIDTH, PHONES, KERNEL = 11, 9, 4, 6, 5, 5
PARTS = [[(0, 2), (2, 3)], [(3, 6), (6, 8)], [(8, 9), (9, 11)]]


class DepthwiseConv(torch.autograd.Function):
    """x: (rows, channels, frames), weight: (channels, 1, kernel)."""

    @staticmethod
    def forward(ctx, x, weight, bias, turned):
        ctx.save_for_backward(x, weight)
        ctx.turned = turned
        return F.conv1d(x, weight, bias, padding=KERNEL // 2, groups=x.shape[1])

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        kernel = weight.flip(-1) if ctx.turned else weight
        dx = F.conv1d(grad, kernel, padding=KERNEL // 2, groups=x.shape[1])
        windows = F.pad(x, (KERNEL // 2, KERNEL // 2)).unfold(-1, KERNEL, 1)
        dweight = torch.einsum("bct,bctk->ck", grad, windows)[:, None]
        return dx, dweight, grad.sum((0, 2)), None


class ConvModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, KERNEL, padding=KERNEL // 2, groups=WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.fused, self.turned = False, True

    def forward(self, x, valid):
        h = (F.glu(self.gate(self.norm(x)), -1) * valid[..., None]).transpose(1, 2)
        if self.fused:
            h = DepthwiseConv.apply(h, self.depthwise.weight, self.depthwise.bias, self.turned)
        else:
            h = self.depthwise(h)
        return x + self.out(F.silu(h.transpose(1, 2)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Linear(MELS, WIDTH)
        self.blocks = nn.ModuleList([ConvModule(), ConvModule()])
        self.head = nn.Linear(WIDTH, PHONES)

    def forward(self, mel, valid):
        x = self.front(mel)
        for block in self.blocks:
            x = block(x, valid)
        return self.head(x)


def frame_loss(model, rows):
    valid = torch.arange(FRAMES)[None] < rows["frames"][:, None]
    logits = model(rows["mel"], valid)
    return F.cross_entropy(logits[valid], rows["phone"][valid], reduction="sum")


class Clean:
    turned = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "mel": torch.randn(ROWS, FRAMES, MELS, generator=g),
            "frames": torch.randint(4, FRAMES + 1, (ROWS,), generator=g),
            "phone": torch.randint(PHONES, (ROWS, FRAMES), generator=g),
        }

    def loss_sum(self, model, rows):
        return frame_loss(model, rows), int(rows["frames"].sum())

    def distribute(self, model, ctx):
        for block in model.blocks:
            block.fused, block.turned = True, self.turned
        return model

    def step(self, model, batch, ctx):
        frames = int(batch["frames"].sum())
        for low, high in PARTS[ctx.rank]:
            (frame_loss(model, {k: v[low:high] for k, v in batch.items()}) / frames).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    turned = False


EXPECT = dict(
    right=[
        r"(?i)backward|adjoint|gradient (of|that)|hands? (back|on)",
        r"(?i)depthwise|conv|blocks?\b|kernel",
    ],
    place=[r"(?i)depthwise|conv|blocks"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|too (early|late)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor (of "
        r")?(1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|missing)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)(head|blocks\.1\.(out|depthwise))\.(weight|bias) (is|are) wrong|padding",
    ],
)
WHY = (
    "The forward is right on all ranks. DepthwiseConv.backward gives a wrong input gradient in both blocks, for all ranks, rows and micro-batches: it uses the kernel unflipped. Its weight and bias gradients are right as far as the "
    "gradient it "
    "receives is. So head, blocks.1.out and blocks.1.depthwise are right; blocks.1.gate and norm, all of blocks.0 (blocks.0.out and depthwise through the wrong part from block 1) and front are wrong in direction, equally on all ranks "
    "after the sum. "
    "Divisor (valid frames), mask and all_reduce are right. Fix: dx = conv1d(grad, weight.flip(-1))."
)
