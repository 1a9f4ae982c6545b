"""Tensor parallelism with DTensor on three ranks (hidden width 10, so 4, 4 and 2): in the feed-forward part of two blocks the up weight is sharded by rows, the down weight by columns; its product is a Partial tensor. Padded tokens are set
to nought on the
local tensor (to_local, fill, from_local as Partial again), then it is redistributed to Replicate. Three micro-batches of 2, 1 and 2 rows; everything else is replicated and needs no sum.

The bug: to_local is told that its gradient has the placement of the forward, Partial. The gradient that comes back is the complete one on every rank (Replicate), and so is summed over the three ranks further down. As in pytorch/pytorch
issue 172932
(to_local + from_local on Partial DTensor produce different gradient), where Partial was what to_local assumed by itself.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
TOKENS, VOCABULARY, WIDTH, HIDDEN, CLASSES = 6, 9, 6, 10, 4
LENGTHS = [4, 6, 2, 5, 3]
PARTS = [(0, 2), (2, 3), (3, 5)]


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.up_bias = (
            nn.Parameter(torch.randn(HIDDEN, WIDTH) * 0.4),
            nn.Parameter(torch.randn(HIDDEN) * 0.2),
        )
        self.down = nn.Parameter(torch.randn(WIDTH, HIDDEN) * 0.4)
        self.shift = nn.Parameter(torch.randn(WIDTH) * 0.2)
        self.mesh, self.told = None, True

    def forward(self, x, there):
        y = self.norm(x)
        if self.mesh is None:
            y = F.gelu(F.linear(y, self.up, self.up_bias)) @ self.down.t()
            return x + y.masked_fill(~there[..., None], 0) + self.shift
        y = DTensor.from_local(y, self.mesh, [Replicate()], run_check=False)
        y = F.gelu(F.linear(y, self.up, self.up_bias)) @ self.down.t()
        part = y.to_local(grad_placements=[Replicate() if self.told else Partial()])
        part = part.masked_fill(~there[..., None], 0)
        y = DTensor.from_local(part, self.mesh, [Partial()], run_check=False)
        return x + y.redistribute(placements=[Replicate()]).to_local() + self.shift

    def shard(self, mesh, told):
        self.mesh, self.told = mesh, told
        for name, dim in (("up", 0), ("up_bias", 0), ("down", 1)):
            cut = distribute_tensor(getattr(self, name).detach(), mesh, [Shard(dim)])
            setattr(self, name, nn.Parameter(cut))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.feeds = nn.ModuleList([Feed(), Feed()])
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids, lengths):
        there = torch.arange(ids.shape[1])[None] < lengths[:, None]
        x = self.embed(ids)
        for feed in self.feeds:
            x = feed(x, there)
            x = x + torch.tanh(self.mix(F.pad(x, (0, 0, 1, 0))[:, :-1]))
        weight = there[..., None].to(x.dtype)
        return self.head((x * weight).sum(1) / weight.sum(1))


class Clean:
    told = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (len(LENGTHS), TOKENS), generator=g),
            "lengths": torch.tensor(LENGTHS),
            "label": torch.randint(CLASSES, (len(LENGTHS),), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], rows["lengths"])
        return F.cross_entropy(logits, rows["label"], reduction="sum"), len(rows["label"])

    def distribute(self, model, ctx):
        mesh = DeviceMesh.from_group(ctx.group("tp"), "cpu", mesh_dim_names=("tp",))
        for feed in model.feeds:
            feed.shard(mesh, self.told)
        return model

    def step(self, model, batch, ctx):
        for low, high in PARTS:
            logits = model(batch["ids"][low:high], batch["lengths"][low:high])
            loss = F.cross_entropy(logits, batch["label"][low:high], reduction="sum")
            (loss / len(batch["label"])).backward()
        for p in model.parameters():
            if isinstance(p, DTensor):
                p.grad = p.grad.redistribute(placements=p.placements)


class Buggy(Clean):
    told = False


EXPECT = dict(
    right=[
        r"(?i)feeds?\b|up\b|down\b|norm|to_local|Partial|DTensor|tensor.?parallel|tp",
        r"(?i)backward|adjoint|gradient|hands? (back|on)|counted|summed",
        r"(?i)\b3\b|three|too (often|large|many|much)|again|repeated|several times"
        r"|tp times|1/3|twice|grad_placements|placement",
    ],
    place=[r"(?i)feeds?(\.[01])?|to_local|\bup\b|\bdown\b|up_bias"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(head|shift)\S* .{0,15}(is|are) (wrong|3 times|three times) ",
        r"(?i)(never|not) (been )?(all.?)?reduced|not summed|missing (sum|reduction)",
        r"(?i)mean of means|divi(ded|des) by (its|their) own|wrong (loss )?divisor",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank \d|rank \d alone|ranks (differ|disagree)",
        r"(?i)(whole|all) gradients? .{0,20}(3|three) times",
        r"(?i)mask .{0,30}wrong|padding .{0,20}attended",
    ],
)
WHY = (
    "The forward is right on all ranks. In the backward of both feeds the gradient of the product with down is taken for Partial, though every rank has the complete one, so everything behind it in the branch comes three times: the "
    "input gradient that goes on through "
    "norm to the residual stream is summed over the ranks with three times its value (for down and up each rank's own shard gradient is reduced or resolved from Partial, too: 3 times). In feeds.1 (the last) down, up, up_bias and norm "
    "get exactly 3 times the right gradient; in "
    "feeds.0 the same branch factor of 3 on top of a stream gradient that is itself mixed; embed and mix (used behind feeds.0, in front of feeds.1) get the right residual part plus three times the branch's part, so wrong in direction. "
    "head and feeds.1.shift are right; feeds.0.shift is wrong "
    "by the branch of feeds.1. All rows, micro-batches and ranks alike. Loss, divisor 5, masks, the placing of the "
    "finished shard gradients are right. Fix: to_local(grad_placements=[Replicate()]) (or nothing: today's torch takes Replicate by itself)."
)
