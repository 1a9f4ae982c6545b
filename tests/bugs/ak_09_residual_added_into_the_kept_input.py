"""Frame classifier for speech (time-delay blocks with residuals, in the form of ESPnet and WeNet encoders) on three data parallel ranks, one to two micro-batches of padded utterances each. To save memory every block runs in a checkpoint
Function written by hand: it keeps the block's input, runs the block without a graph and again in the backward. The parameters' gradients are summed over the ranks.

The bug: the residual is added in place, x.add_(block(x)), to save another buffer; the checkpoint keeps x by reference on ctx (not with save_for_backward, which would notice), so that the backward runs the blocks again on what x has
become. As in the PyTorch notes on saving inputs on ctx without save_for_backward and reports on inplace residuals with checkpoints.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
FEATURES, WIDTH, PHONES, BLOCKS, LONGEST = 5, 6, 7, 3, 9
PARTS = [[(0, 2), (2, 3)], [(3, 5)], [(5, 6), (6, 9)]]
LENGTHS = [7, 4, 9, 5, 8, 3, 6, 9, 2]


class Rerun(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, mask, x, *weights):
        ctx.block, ctx.mask, ctx.x, ctx.weights = block, mask, x.detach(), weights
        with torch.no_grad():
            return block(x, mask)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            out = ctx.block(x, ctx.mask)
        return None, None, *torch.autograd.grad(out, (x, *ctx.weights), grad)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.context = nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=1)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        h = self.norm(x) * mask
        h = F.glu(self.context(h.transpose(1, 2)).transpose(1, 2), -1)
        return self.out(F.silu(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, PHONES)
        self.rerun = self.in_place = False

    def forward(self, x, mask):
        x = self.stem(x)
        for block in self.blocks:
            if not self.rerun:
                x = x + block(x, mask)
            else:
                y = Rerun.apply(block, mask, x, *block.parameters())
                x = x.add_(y) if self.in_place else x + y
        return self.head(self.norm(x))


def frame_loss(model, rows):
    real = torch.arange(rows["speech"].shape[1])[None] < rows["length"][:, None]
    scores = model(rows["speech"], real[..., None].to(rows["speech"].dtype))
    return F.cross_entropy(scores[real], rows["phone"][real], reduction="sum")


class Clean:
    in_place = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        n = len(LENGTHS)
        return {
            "speech": torch.randn(n, LONGEST, FEATURES, generator=g),
            "length": torch.tensor(LENGTHS),
            "phone": torch.randint(PHONES, (n, LONGEST), generator=g),
        }

    def loss_sum(self, model, rows):
        return frame_loss(model, rows), int(rows["length"].sum())

    def distribute(self, model, ctx):
        model.rerun, model.in_place = True, self.in_place
        return model

    def step(self, model, batch, ctx):
        frames = int(batch["length"].sum())
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            (frame_loss(model, rows) / frames).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    in_place = True


EXPECT = dict(
    right=[
        r"(?i)blocks?\b|Rerun|checkpoint|recomput",
        r"(?i)backward|recomput|adjoint|checkpoint|again|gradient (of|that)|hands? (back|on)",
        r"(?i)blocks?(\.|\b)|residual|x\b",
    ],
    place=[r"(?i)blocks?\.?\[?[012]?|Rerun|checkpoint"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(?<![.\w])(head|norm)\.(weight|bias) (is|are) wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|"
        r"again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)dropout|random",
        r"(?i)(only|just|alone) (in )?blocks?\.?[012]\b|blocks?\.[012] alone",
    ],
)
WHY = (
    "The forward, the loss and the gradients of head and the last norm are right on all ranks. All in-place additions write into the stem's one output tensor, whose storage every block's checkpoint keeps, so in the backward all "
    "three blocks are run again on the final x (stem's output plus all three residuals) instead of the x they saw; even the last block sees x with its own output added. So the gradients of all parameters of blocks.0, 1 and 2 and "
    "what they hand back (and with it the stem's) are wrong in direction, for all rows, micro-batches and ranks, except blocks.2.out.bias, whose gradient is the sum of the output's gradient and does not depend on the recomputed "
    "input. Divisor 53, masks and the sum over ranks are right. Fix: x = x + y, or keep a copy of the input (save_for_backward would raise)."
)
