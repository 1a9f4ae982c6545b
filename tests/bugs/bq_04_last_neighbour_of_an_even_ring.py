"""Sigmoid image-text loss on four data-parallel ranks, eight pairs: each rank scores its images with its own texts, then with those of the other ranks, which are exchanged with the neighbours in both directions at a time (open_clip's bidirectional
SigLipLoss); with four ranks one exchange in both directions and one more in a single direction. Exchanges are autograd Functions that send gradients back. Gradients are summed over the ranks.

The bug: in the single-direction exchange that remains with an even number of ranks the block of logits is scored like the own one, with its diagonal as matching pairs. After open_clip SigLipLoss (negative_only) and reports on it in re-implementations.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
ROWS, PIXELS, WORDS, WIDTH = 8, 7, 5, 6


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(PIXELS, 9), nn.Tanh(), nn.Linear(9, WIDTH))
        self.text = nn.Sequential(nn.Linear(WORDS, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.logit_scale = nn.Parameter(torch.tensor(0.9))
        self.logit_bias = nn.Parameter(torch.tensor(-1.5))

    def encode_image(self, x):
        return F.normalize(self.image(x), dim=-1)

    def encode_text(self, x):
        return F.normalize(self.text(x), dim=-1)


def swap(tensor, to, source, group):
    received = torch.empty_like(tensor)
    work = [
        dist.isend(tensor.contiguous(), to, group=group),
        dist.irecv(received, source, group=group),
    ]
    for w in work:
        w.wait()
    return received


class NeighbourExchange(torch.autograd.Function):
    @staticmethod
    def forward(fctx, source, to, group, tensor):
        fctx.source, fctx.to, fctx.group = source, to, group
        return swap(tensor, to, source, group)

    @staticmethod
    def backward(fctx, grad):
        return None, None, None, swap(grad, fctx.source, fctx.to, fctx.group)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Towers()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(ROWS, PIXELS, generator=g),
            "text": torch.randn(ROWS, WORDS, generator=g),
        }

    def loss_sum(self, model, rows):
        full = self.batch()
        images = model.encode_image(full["image"][rows])
        texts = model.encode_text(full["text"])
        logits = model.logit_scale.exp() * images @ texts.T + model.logit_bias
        sign = 2 * (torch.arange(ROWS) == rows[:, None]).to(logits.dtype) - 1
        return -F.logsigmoid(sign * logits).sum(), len(rows)

    @staticmethod
    def block_loss(model, images, texts, negative_only=False):
        logits = model.logit_scale.exp() * images @ texts.T + model.logit_bias
        labels = -torch.ones_like(logits)
        if not negative_only:
            labels = 2 * torch.eye(len(images), dtype=logits.dtype) + labels
        return -F.logsigmoid(labels * logits).sum()

    def both_ways(self, model, images, to_left, to_right, ring):
        left, right, group = ring
        from_right = NeighbourExchange.apply(right, left, group, to_left)
        from_left = NeighbourExchange.apply(left, right, group, to_right)
        loss = 0.0
        for texts in (from_right, from_left):
            loss = loss + self.block_loss(model, images, texts, negative_only=True)
        return loss, from_right, from_left

    def one_way(self, model, images, to_right, ring):
        left, right, group = ring
        texts = NeighbourExchange.apply(left, right, group, to_right)
        return self.block_loss(model, images, texts, negative_only=True)

    def siglip_loss(self, model, images, texts, ctx):
        n = ctx.world_size
        ring = ((ctx.rank - 1) % n, (ctx.rank + 1) % n, ctx.group("dp"))
        loss = self.block_loss(model, images, texts)
        to_left = to_right = texts
        pairs, remainder = divmod(n - 1, 2)
        for _ in range(pairs):
            more, to_left, to_right = self.both_ways(model, images, to_left, to_right, ring)
            loss = loss + more
        if remainder:
            loss = loss + self.one_way(model, images, to_right, ring)
        return loss

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for p in model.parameters():
            p.grad = None
        images, texts = model.encode_image(mine["image"]), model.encode_text(mine["text"])
        (self.siglip_loss(model, images, texts, ctx) / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def one_way(self, model, images, to_right, ring):
        left, right, group = ring
        texts = NeighbourExchange.apply(left, right, group, to_right)
        return self.block_loss(model, images, texts)


EXPECT = dict(
    right=[
        r"label|positive|negative_only|negatives?|diagonal|eye|match|pairs? |target|sign|logsigmoid",
        r"one_way|single|remainder|remain|last (hop|exchange|neighbour|neighbor|block)|opposite|two ranks away|third|received|other rank|block_loss|exchange",
    ],
    place=[r"one_way", r"block_loss", r"labels|eye|diagonal", r"NeighbourExchange|siglip_loss"],
    wrong=[
        r"backward of NeighbourExchange.{0,40}(wrong|missing)|gradient.{0,30}(sent|returned) to the wrong",
        r"all.?reduce.{0,40}(missing|twice)|not reduced|reduced twice|without gradient|no_grad|detach",
        r"divisor|own count|mean of means",
        r"(block|texts?|rank) (is|are) (scored|counted) twice|never (scored|exchanged)|wrong neighbour",
    ],
)
WHY = (
    "With four ranks the texts of the rank opposite arrive by the single-direction exchange; one_way calls block_loss without negative_only, so the diagonal of that block (two pairs on each of the four ranks) is scored as matching although none of these pairs matches. "
    "Forward and gradient of those eight of 64 logits have the sign of positives on all ranks; exchange, its way back and sums over the ranks are right. A right cause says that the labels of the remaining exchanged block are those of matching pairs (negatives taken for positives). "
    "Fix: negative_only=True."
)
