"""Second-order (bilinear) pooling on three data-parallel ranks; the saved activations are offloaded by saved_tensors_hooks, several micro-batches per rank, own flat bucket for the sum of the gradients.

The bug: the offloader keeps one host copy per saved tensor and finds it again by address, shape and dtype. The pooling is h @ h.transpose(1, 2) with as many tokens as channels: h and its transpose have the same address and the same shape and
differ in their strides only, so the transpose comes back as h. As in modelscope/ms-swift PR 10157 (activation views in CPU offload), similar to TRL's offloader (PR 4247, 6241).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, TOKENS, INPUT, CHANNELS, CLASSES, MICRO = 11, 6, 5, 6, 4, 2


class SecondOrder(nn.Module):
    """Every pair of tokens: h h^T."""

    def forward(self, h):
        return torch.bmm(h, h.transpose(1, 2)) / CHANNELS


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(INPUT, 9)
        self.mix = nn.Linear(9, CHANNELS)
        self.pool = SecondOrder()
        self.head = nn.Linear(TOKENS * TOKENS, CLASSES)

    def forward(self, x):
        h = torch.tanh(self.mix(F.gelu(self.enter(x))))
        return self.head(self.pool(h).flatten(1))


class Offload:
    """Saved tensors go to the host; a tensor that is saved twice goes there once."""

    def __init__(self, with_strides):
        self.with_strides, self.host, self.alive = with_strides, {}, []

    def pack(self, t):
        if isinstance(t, nn.Parameter):
            return t
        key = (t.data_ptr(), tuple(t.shape), t.dtype)
        if self.with_strides:
            key += (t.stride(),)
        if key not in self.host:
            self.host[key] = t.detach().clone(memory_format=torch.contiguous_format)
            self.alive.append(
                t.detach()
            )  # so that the allocator does not give this address to another one before the backward
        return key

    def unpack(self, key):
        return key if isinstance(key, torch.Tensor) else self.host[key]


class Clean:
    with_strides = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, TOKENS, INPUT, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["y"])

    def step(self, model, batch, ctx):
        mine = torch.arange(ROWS).tensor_split(ctx.world_size)[ctx.rank]
        for part in mine.split(MICRO):
            offload = Offload(self.with_strides)
            with torch.autograd.graph.saved_tensors_hooks(offload.pack, offload.unpack):
                loss = (
                    F.cross_entropy(model(batch["x"][part]), batch["y"][part], reduction="sum")
                    / ROWS
                )
            loss.backward()
        grads = [p.grad for p in model.parameters()]
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat, group=ctx.group("dp"))
        for g, piece in zip(grads, flat.split([g.numel() for g in grads])):
            g.copy_(piece.view_as(g))


class Buggy(Clean):
    with_strides = False


EXPECT = dict(
    right=[
        r"(?i)saved|offload|pack|hook|backward (of|through|in|at)|transpos|stride",
        r"(?i)pool|bmm|SecondOrder|second.?order|h @ h|matrix product",
    ],
    place=[r"(?i)pool|bmm|SecondOrder|saved (tensor|activation)|offload"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)head\.(weight|bias) (is|are) wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)rows? .{0,20}(never read|read twice|dropped)",
        r"(?i)only (on )?rank \d|rank \d alone",
    ],
)
WHY = (
    "bmm saves h and h.transpose(1, 2) for its backward. Both are (rows, 6, 6), start at the same address and differ in their strides only; the offloader's key has address, shape and dtype, so the second one is not copied and unpack gives "
    "h in its stead. The gradient of the pooling's first argument is then dG h^T instead of dG h (the second argument's part, dG^T h, is right). The forward is right, the loss is right, head.weight and head.bias are right; enter.* and "
    "mix.* are wrong in direction, on all three ranks, in every micro-batch and every row. Division by 11 rows, the flat bucket and its sum are right. Fix: put the strides (and the offset) into the key, or restore the view with as_strided."
)
