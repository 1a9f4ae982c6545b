"""Fine tuning with peft's LoHa (Hadamard product adapters) under hand-written tensor parallelism: the base model is frozen, "up" is column parallel and "down" row parallel over tp, "inp" is replicated. An adapted weight's change is
(w1_a w1_b) * (w2_a w2_b), of which the factors *_a have the output rows and are cut with "up", and *_b see all inputs and are replicated. Two replicas (dp) x two shards (tp), two micro-batches.

The bug: the gradients that are summed over tp are picked by LoRA's convention (lora_A replicated, lora_B cut), i.e. the "_a" factors: in LoHa it is the other way round. The cut w*_a of different output rows are added up, and the
replicated w*_b keep the contribution of the own shard. After reports on replicated LoRA factors under TP (mcore-bridge PR 173) and on name-based lists that were written for LoRA and then used with other adapters.
"""

import torch
import torch.distributed as dist
from peft import LoHaConfig, get_peft_model
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, FEATURES, WIDTH, HIDDEN, OUT = 9, 5, 6, 10, 3


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x, enter=lambda t: t, leave=lambda t: t):
        h = torch.tanh(self.inp(x))
        y = leave(
            nn.functional.linear(torch.nn.functional.gelu(self.up(enter(h))), self.down.weight)
        )
        return self.head(torch.tanh(h + y + self.down.bias))


class CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad, None


class ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        model = Regressor()
        config = LoHaConfig(r=3, alpha=6, target_modules=["inp", "up"], init_weights=False)
        return get_peft_model(model, config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FEATURES, generator=g),
            "y": torch.randn(ROWS, OUT, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["x"]) - rows["y"]).square().sum(), len(rows["x"])

    def distribute(self, model, ctx):
        size, me = ctx.axes["tp"], ctx.coords["tp"]

        def cut(owner, name, dim):
            p = owner[name] if isinstance(owner, nn.ParameterDict) else getattr(owner, name)
            own = nn.Parameter(
                p.detach().chunk(size, dim)[me].clone(), requires_grad=p.requires_grad
            )
            if isinstance(owner, nn.ParameterDict):
                owner[name] = own
            else:
                setattr(owner, name, own)

        base = model.base_model.model
        cut(base.up.base_layer, "weight", 0)
        cut(base.up.base_layer, "bias", 0)
        cut(base.up.hada_w1_a, "default", 0)
        cut(base.up.hada_w2_a, "default", 0)
        cut(base.down, "weight", 1)
        return model

    def summed_over_tp(self, name):
        """Replicated parameters of the column-parallel layer: each rank has the part of its own output rows."""
        return ".up." in name and ("hada_w1_b" in name or "hada_w2_b" in name)

    def step(self, model, batch, ctx):
        tp = ctx.group("tp")
        rows = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        for _, p in trained:
            p.grad = None
        for n in range(2):
            x, y = (rows[k].tensor_split(2)[n] for k in ("x", "y"))
            out = model(
                x, enter=lambda t: CopyToTP.apply(t, tp), leave=lambda t: ReduceFromTP.apply(t, tp)
            )
            ((out - y).square().sum() / ROWS).backward()
        for name, p in trained:
            if self.summed_over_tp(name):
                dist.all_reduce(p.grad, group=tp)
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def summed_over_tp(self, name):
        return ".up." in name and name.split(".")[-2].endswith("_a")


EXPECT = dict(
    right=[
        r"tp|tensor.?parallel",
        r"hada|w1_[ab]|w2_[ab]|_a\b|_b\b|adapter|factor|replicated",
        r"(not|never|n't|without|missing|lack).{0,30}(reduc|sum|all.?reduce)|(reduc|sum|add).{0,60}(not|wrong|though|although|but|other|differ|cut|shard)|own (part|share|shard|contribution)|partial|extra|wrong (parameter|factor|tensor)|swapp|instead of",
    ],
    place=[
        r"summed_over_tp",
        r"hada_w[12]_[ab]",
        r"\.up\.|\bup\b",
        r"all_reduce\(p\.grad|all.?reduce",
    ],
    wrong=[
        r"over dp.{0,40}(missing|not reduced|twice)|data.?parallel.{0,40}(missing|not reduced)",
        r"CopyToTP.{0,40}(missing|wrong)|ReduceFromTP.{0,40}(missing|wrong)|forward.{0,30}is wrong",
        r"divisor|denominator|mean of means|micro.?batch(es)?.{0,30}(lost|dropped|overwritten)",
    ],
)
WHY = (
    "summed_over_tp chooses hada_w1_a and hada_w2_a of the layer up, which are cut over tp (rows 0-4 and 5-9), so that on all four ranks gradients of different output rows are added, and leaves out hada_w1_b and hada_w2_b, which are replicated "
    "and keep only the part of the own shard's output rows (each tp rank another). Everything else (forward, dp reduction, inp's adapters) is right. A right cause says that over tp the wrong factors are reduced: the replicated _b are not, "
    "and/or the cut _a are although they must not be. Fix: reduce the _b factors."
)
