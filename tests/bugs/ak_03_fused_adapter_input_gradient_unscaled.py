"""Adapter tuning (peft LoRA, r 2, alpha 6, so scaling 3) of a small frozen residual network on two data parallel ranks with two micro-batches each. The adapted linear layers run through a fused autograd Function with a backward by hand,
put in place of peft's forward, as fast LoRA kernels do; the gradients of the adapters and of the saved head are summed over the ranks.

The bug: in the hand-written backward the scaling is folded into the gradients of A and B, and the part of the input's gradient that goes through the adapter is left without it. After hand-written LoRA backwards as planned in
MakazhanAlpamys/Soup issue 792 and built in axolotl PR 2324 (LoRA custom autograd functions).
"""

import functools

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
FEATURES, WIDTH, INNER, CLASSES, BLOCKS = 6, 8, 10, 4, 3
PARTS = [[(0, 4), (4, 6)], [(6, 9), (9, 13)]]


class FusedLora(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, a, b, scaling, scale_input):
        low = x @ a.T
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scaling, ctx.scale_input = scaling, scale_input
        return x @ weight.T + bias + scaling * (low @ b.T)

    @staticmethod
    def backward(ctx, grad):
        x, weight, a, b, low = ctx.saved_tensors
        back = grad @ b
        grad_a = ctx.scaling * (back.T @ x)
        grad_b = ctx.scaling * (grad.T @ low)
        through = back @ a
        if ctx.scale_input:
            through = ctx.scaling * through
        return grad @ weight + through, None, None, grad_a, grad_b, None, None


def fused_forward(layer, scale_input, x):
    name = layer.active_adapters[0]
    return FusedLora.apply(
        x,
        layer.base_layer.weight,
        layer.base_layer.bias,
        layer.lora_A[name].weight,
        layer.lora_B[name].weight,
        layer.scaling[name],
        scale_input,
    )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Clean:
    scale_input = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = LoraConfig(
            r=2,
            lora_alpha=6,
            target_modules=["up", "down"],
            modules_to_save=["head"],
            init_lora_weights=False,
        )
        return get_peft_model(Net(), config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        return {
            "x": torch.randn(rows, FEATURES, generator=g),
            "y": torch.randint(CLASSES, (rows,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["y"])

    def distribute(self, model, ctx):
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.forward = functools.partial(fused_forward, module, self.scale_input)
        return model

    def step(self, model, batch, ctx):
        for low, high in PARTS[ctx.rank]:
            scores = model(batch["x"][low:high])
            loss = F.cross_entropy(scores, batch["y"][low:high], reduction="sum")
            (loss / len(batch["y"])).backward()
        for p in model.parameters():
            if p.requires_grad and p.grad is not None:
                dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    scale_input = False


EXPECT = dict(
    right=[
        r"(?i)backward|adjoint|gradient (of|that|with respect)|hands? (back|on)",
        r"(?i)\b(up|down)\b|lora|adapter|Fused|linear",
        r"(?i)input|hands? (back|on)|backward|before|below|earlier",
    ],
    place=[r"(?i)blocks\S*\.?(up|down)|FusedLora|\b(up|down)\b|lora|adapter"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)head\S* (is|are) wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|"
        r"again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)norm\S* .{0,20}backward.{0,20}wrong",
        r"(?i)blocks\.2\.down\.lora_[AB]\S* (is|are) wrong",
    ],
)
WHY = (
    "The forward is right, and so are the gradients of A and B inside every fused layer for the output gradient it gets. The input gradient is wrong in all six adapted layers (blocks.0-2, up and down): it is g W + g B A and should "
    "be g W + 3 g B A. So the error starts below the last adapted layer: the saved head and blocks.2.down's adapters are right, the adapters of blocks.2.up and of both layers of blocks.0 and blocks.1 are wrong in direction, more "
    "the earlier they are. All ranks, rows and micro-batches; identical on both ranks after the sum. Divisor 13 and reduction are right. Stem, norms and base layers are frozen. Fix: through = scaling * (g B A)."
)
