"""Own reduction of the gradients in the style of ZeRO++'s qgZ (DeepSpeed all_to_all_quant_reduce): the flat gradient is cut into one chunk per rank, every block of 8 is divided by its largest magnitude, the payload goes through an
all-to-all, each rank multiplies the scales back, sums its chunk, and the chunks are gathered. The rounding of the payload is off (the check of the plumbing that one does first), so the reduction is exact. dp 3, uneven rows, three micro-batches.

The bug: the scales are not sent. The receiver multiplies each payload by the scales of its own gradient for that chunk, which it has at hand. A mistake of own quantised collectives (the scales are a second tensor and a second all-to-all);
compare the qgZ reports in deepspeedai/DeepSpeed (issue 6926, PR 5056).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, INPUT, WIDTH, CLASSES, BLOCK, MICROS = 13, 7, 10, 5, 8, 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Linear(INPUT, WIDTH)
        self.gate = nn.Linear(INPUT, WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.out(torch.sigmoid(self.gate(x)) * self.words(x))


def scaled(chunks):
    """(payload, scales) of chunks (ranks, blocks, BLOCK); a block of zeros has the scale 1."""
    scales = chunks.abs().amax(-1, keepdim=True)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    return chunks / scales, scales


class Clean:
    scales_travel = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUT, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["y"])

    def reduce(self, grads, group):
        n, rank = dist.get_world_size(group), dist.get_rank(group)
        flat = torch.cat([g.reshape(-1) for g in grads])
        size = flat.numel()
        flat = F.pad(flat, (0, -size % (n * BLOCK)))
        payload, scales = scaled(flat.view(n, -1, BLOCK))  # chunk i is for rank i
        received = torch.empty_like(payload)
        dist.all_to_all_single(received, payload, group=group)
        if self.scales_travel:
            their_scales = torch.empty_like(scales)
            dist.all_to_all_single(their_scales, scales, group=group)
        else:
            their_scales = scales[rank]
        chunk = (received * their_scales).sum(0).reshape(-1)
        whole = torch.empty_like(flat)
        dist.all_gather_into_tensor(whole, chunk, group=group)
        for g, piece in zip(grads, whole[:size].split([g.numel() for g in grads])):
            g.copy_(piece.view_as(g))

    def step(self, model, batch, ctx):
        mine = torch.arange(ROWS).tensor_split(ctx.world_size)[ctx.rank]
        for part in mine.tensor_split(MICROS):
            (
                F.cross_entropy(model(batch["x"][part]), batch["y"][part], reduction="sum") / ROWS
            ).backward()
        self.reduce([p.grad for p in model.parameters()], ctx.group("dp"))


class Buggy(Clean):
    scales_travel = False


EXPECT = dict(
    right=[
        r"(?i)scale|quanti|all.?to.?all|reduc|exchange|collective|put together|after the (local )?backward",
        r"(?i)other ranks?|own (scale|factor)|receiv|sender|source|owner|block|chunk|wrong (scale|factor|weight)|(factor|weight|coefficient)s? .{0,40}(var|differ|each|unlike)",
    ],
    place=[r"(?i)reduc|all.?to.?all|scale|after the (local )?backward|chunk|collective|exchange"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own (count|rows|tokens)|factor of (1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)rows? .{0,20}(never read|read twice|dropped)",
        r"(?i)(only|just) (words|gate|out)\.(weight|bias) (is|are) wrong",
        r"(?i)goes wrong in the backward (of|through)|(local|own) backward (is|goes) wrong",
        r"(?i)ranks? (disagree|hold different)",
    ],
)
WHY = (
    "Forward, backward and the local gradients are right on all ranks. In the reduction rank r owns chunk r of the flat gradient (215 elements, padded to 3 x 72; chunk 0: words.weight and two elements of words.bias, chunk 1: the rest of "
    "words.bias and gate.weight but its last 6 elements, chunk 2: these 6, gate.bias and out.*). For each block of 8 elements it should compute the sum over sources s of payload_s * scale_s, but uses its own scale_r for all three sources: its own part is right, those of the two other ranks are each "
    "multiplied by scale_r / scale_s, a factor that differs from block to block, and is of order 1. All parameters are wrong, in direction; the wrong result is the same on all ranks as the chunks are gathered afterwards. Which rank's rows "
    "are right depends on the chunk: rank 0's in chunk 0, rank 1's in chunk 1, rank 2's in chunk 2. Division by 13, micro-batches, order of chunks are right. Fix: send the scales through an all-to-all like the payload."
)
