"""Sound event detection (a GRU over frames; input layer and output layer tied) on three ranks, two micro-batches each. The GRU's weights are laid into one flat buffer, as flatten_parameters does for cuDNN, so its parameters are views of
one storage. The gradients are summed by hand over a list of the parameters of all parts, from which repeated ones (the tied weight) are taken out. The divisor is the number of frames of the whole batch.

The bug: parameters are told apart by the address of their storage. All of the GRU's weights have the same one, so only the first counts and the others are never summed. After safetensors PR #379 (views of one storage are found to be
duplicates) and NVIDIA/Model-Optimizer PR #2092 (leaves the data_ptr approach to find shared weights).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, FRAMES, BANDS, WIDTH = 10, 6, 5, 6
PARTS = [[(0, 2), (2, 3)], [(3, 4), (4, 7)], [(7, 8), (8, 10)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(BANDS, WIDTH)
        self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.decoder = nn.Linear(BANDS, WIDTH, bias=False)
        self.decoder.weight = self.encoder.weight
        self.offset = nn.Parameter(torch.randn(BANDS) * 0.1)

    def forward(self, x):
        hidden, _ = self.memory(torch.tanh(self.encoder(x)))
        return hidden @ self.decoder.weight + self.offset


def flatten(module):
    parameters = list(module.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    start = 0
    for p in parameters:
        p.data = flat[start : start + p.numel()].view_as(p)
        start += p.numel()


def without_repeats(parameters, key):
    seen, kept = set(), []
    for p in parameters:
        if key(p) not in seen:
            seen.add(key(p))
            kept.append(p)
    return kept


class Clean:
    key = staticmethod(id)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "sound": torch.randn(ROWS, FRAMES, BANDS, generator=g),
            "event": (torch.rand(ROWS, FRAMES, BANDS, generator=g) < 0.3).long(),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["sound"])
        loss = F.binary_cross_entropy_with_logits(
            logits, rows["event"].to(logits.dtype), reduction="sum"
        )
        return loss, len(logits) * FRAMES

    def distribute(self, model, ctx):
        flatten(model.memory)
        return model

    def step(self, model, batch, ctx):
        frames = len(batch["sound"]) * FRAMES
        for low, high in PARTS[ctx.rank]:
            loss, _ = self.loss_sum(model, {k: v[low:high] for k, v in batch.items()})
            (loss / frames).backward()
        parts = [model.encoder, model.memory, model.decoder]
        everything = [p for m in parts for p in m.parameters()] + [model.offset]
        for p in without_repeats(everything, self.key):
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    key = staticmethod(lambda p: p.untyped_storage().data_ptr())


EXPECT = dict(
    right=[
        r"(?i)(not|never|n't)( been)? (all.?)?(reduced|summed|added|averaged)|(own|local) (part|"
        r"gradient|rows|share)|"
        r"missing (all.?)?reduc|left out of the (sum|reduction)|un(reduced|summed)|without (the "
        r")?(sum|all.?reduce)|only its own",
        r"(?i)memory|GRU|weight_hh|bias_[ih]h",
    ],
    place=[r"(?i)memory|weight_hh_l0|bias_ih_l0|bias_hh_l0"],
    wrong=[
        r"(?i)weight_ih_l0[^,;.]{0,30}(not|never) (been )?(all.?)?(reduced|summed)",
        r"(?i)(encoder|decoder|offset)\S* (is|are|was|were) (not|never) (been )?(all.?)?(reduced|"
        r"summed)",
        r"(?i)(reduced|summed|counted) twice|too (early|late)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|missing)",
        r"(?i)forward (is wrong|goes wrong)|backward of .{0,30} is wrong",
    ],
)
WHY = (
    "memory.weight_hh_l0, memory.bias_ih_l0 and memory.bias_hh_l0 are never summed over the ranks: each rank keeps the gradient of its own rows (0-2, 3-6, 7-9; both micro-batches), the three add up to the right one. They share a storage "
    "with "
    "memory.weight_ih_l0, which comes first and is the only one of the four that the list keeps. weight_ih_l0, the tied encoder.weight (once, as it should be), encoder.bias and offset are summed and right. Forward, backward, divisor 60 "
    "are right. "
    "Fix: tell parameters apart by identity (or by storage, offset and size)."
)
