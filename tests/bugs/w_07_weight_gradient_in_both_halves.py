"""A decoder in two pipeline stages, two data-parallel ranks each, with the backward split in an input half (at once) and a weight half (later), as in zero-bubble schedules. The linear layers add their
weight's gradient to `main_grad` in the backward itself (fused accumulation) and return none to autograd. After the reports on Megatron-like `gradient_accumulation_fusion` and Transformer
Engine's `delay_wgrad_compute` under split backwards.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 2}}}}
ROWS, LENGTH, VOCABULARY, WIDTH, MICRO = 11, 6, 17, 8, 3


class FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, wanted):
        ctx.save_for_backward(x, weight)
        ctx.wanted = wanted
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        if ctx.wanted():
            weight.main_grad.addmm_(grad.flatten(0, -2).T, x.flatten(0, -2))
        return grad @ weight, None, None


class Linear(nn.Linear):
    wanted = None

    def forward(self, x):
        if self.wanted is None:
            return F.linear(x, self.weight, self.bias)
        y = FusedLinear.apply(x, self.weight, self.wanted)
        return y if self.bias is None else y + self.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.past = nn.LayerNorm(WIDTH), Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = Linear(WIDTH, 11), Linear(11, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        y = y + self.past(y.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])
        return x + self.down(F.silu(self.up(y)))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), Linear(WIDTH, VOCABULARY, bias=False)


def token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    def loss_sum(self, model, rows):
        x = model.embed(rows["ids"])
        for block in model.blocks:
            x = block(x)
        return token_loss(model.head(model.norm(x)), rows["labels"]), (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        stage = ctx.coords["pp"]
        for i in range(4):
            if i // 2 != stage:
                model.blocks[i] = nn.Identity()
        if stage == 0:
            model.norm, model.head = None, None
        else:
            model.embed = None
        for part in model.modules():
            if isinstance(part, Linear):
                part.wanted = self.weight_gradient_wanted
        return model

    def weight_gradient_wanted(self):
        return self.half == "weight"

    def gradient_of(self, name, param, ctx):
        return getattr(param, "main_grad", param.grad)

    def input_half(self, out, entry, dout):
        self.half = "input"
        return torch.autograd.grad(out, [entry], dout, retain_graph=True)[0]

    def weight_half(self, out, dout):
        self.half = "weight"
        grads = torch.autograd.grad(out, self.params, dout, allow_unused=True)
        for p, g in zip(self.params, grads, strict=True):
            if g is not None:  # the fused ones have put theirs into main_grad
                p.grad += g

    def step(self, model, batch, ctx):
        stage, ranks = ctx.coords["pp"], dist.get_process_group_ranks(ctx.group("pp"))
        self.params = list(model.parameters())
        for p in self.params:
            p.grad = torch.zeros_like(p)
        for part in model.modules():
            if isinstance(part, Linear):
                part.weight.main_grad = torch.zeros_like(part.weight)
        total = (batch["labels"] != -100).sum()
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        entries, outs, waiting = [], [], []
        for m in range(MICRO):
            ids, labels = (mine[k].tensor_split(MICRO)[m] for k in ("ids", "labels"))
            if stage == 0:
                entry = None
                x = model.embed(ids)
            else:
                entry = torch.empty(*ids.shape, WIDTH, dtype=ctx.dtype)
                dist.recv(entry, ranks[0])
                x = entry.requires_grad_()
            for i in (2 * stage, 2 * stage + 1):
                x = model.blocks[i](x)
            if stage == 0:
                dist.send(x.detach().contiguous(), ranks[1])
            else:
                x = token_loss(model.head(model.norm(x)), labels) / total
            entries.append(entry)
            outs.append(x)
        for m in range(MICRO):
            dout = None
            if stage == 0:
                dout = torch.empty_like(outs[m])
                dist.recv(dout, ranks[1])
            else:
                dist.send(self.input_half(outs[m], entries[m], dout).contiguous(), ranks[0])
            waiting.append((outs[m], dout))
            if len(waiting) > 1:
                self.weight_half(*waiting.pop(0))
        while waiting:
            self.weight_half(*waiting.pop(0))
        for name, p in model.named_parameters():
            dist.all_reduce(self.gradient_of(name, p, ctx), group=ctx.group("dp"))


class Buggy(Clean):
    def weight_gradient_wanted(self):
        return True


EXPECT = dict(
    right=[
        r"head|blocks\.[23]|past|up|down|FusedLinear|main_grad|linear",
        r"twice|\b2(\.0+)? ?(times|x|×)|two times|double|factor (of )?2|times 2|again|\b2\b",
    ],
    place=[r"head|blocks\.[23]|stage|\bpp\b|FusedLinear|main_grad|w_07\S*:\d+"],
    wrong=[
        r"forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(is|are|was|were) (never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"(own|local) (count|denominator|divisor)|rows? .{0,20}(never read|read twice)",
        r"blocks\.[01]\S* (is|are|has|have|was|were) (a )?(wrong|missing|partial|twice|2 times)",
        r"(norm|bias|embed)\S* (is|are|has|have|was|were) (a )?(wrong|missing|partial|twice|2 times)",
        r"gradient of other targets|(all.?reduced|reduced|summed) (twice|again)",
    ],
)
WHY = (
    "FusedLinear's backward adds the weight's gradient to main_grad whenever it runs. On the last stage it runs twice for each micro-batch, once in the input half and once in the weight half, and adds in both: main_grad of head.weight and "
    "of blocks.2 / blocks.3 past.weight, up.weight, down.weight is exactly twice the right one, on both ranks of stage 1. Stage 0 has no input half (nothing is sent further back), its weights are right; so are all biases, norms and the "
    "embedding, whose gradients come from autograd in the weight half alone. Forward, activations' gradients, loss, divisor and the reduction over dp are right."
)
