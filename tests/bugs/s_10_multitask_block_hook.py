"""A multi-task recommender with mixed experts (MMoE): clicks on all rows, time spent on the clicked ones, curriculum weights per row; DDP of four
(3, 3, 3 and 2 rows) with a communication hook of one's own that sums the bucket in blocks of equal size. After the well-known slip
in chunked collectives, of which FAULTS' bucket cases are relatives.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
ROWS, INPUTS, WIDTH, EXPERTS, TASKS, BLOCK = 11, 8, 6, 3, 2, 96


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(INPUTS, 10)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 9), nn.GELU(), nn.Linear(9, WIDTH)) for _ in range(EXPERTS)
        )
        self.gates = nn.ModuleList(nn.Linear(10, EXPERTS) for _ in range(TASKS))
        self.towers = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(TASKS))

    def forward(self, x):
        h = F.gelu(self.stem(x))
        each = torch.stack([e(h) for e in self.experts], 1)
        out = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            mixed = (gate(h).softmax(-1)[..., None] * each).sum(1)
            out.append(tower(mixed).squeeze(-1))
        return out


def two_losses(click, spent, rows):
    clicked = rows["clicked"].to(click.dtype)
    a = F.binary_cross_entropy_with_logits(click, clicked, reduction="none")
    b = clicked * (spent - rows["spent"]).square()
    return (rows["weight"] * (a + 0.5 * b)).sum()


def blocks_up(size):
    return (size + BLOCK - 1) // BLOCK


def blocks_down(size):
    return size // BLOCK


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Mixture()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "clicked": torch.rand(ROWS, generator=g) < 0.6,
            "spent": torch.randn(ROWS, generator=g).exp(),
            "weight": 0.3 + torch.rand(ROWS, generator=g),
        }

    def loss_sum(self, model, rows):
        return two_losses(*model(rows["x"]), rows), len(rows["x"])

    blocks = staticmethod(blocks_up)

    def distribute(self, model, ctx):
        group, blocks = ctx.group("dp"), self.blocks

        def hook(_, bucket):
            flat = bucket.buffer()
            works = [
                dist.all_reduce(flat[i * BLOCK : (i + 1) * BLOCK], group=group, async_op=True)
                for i in range(blocks(flat.numel()))
            ]
            for work in works:
                work.wait()
            done = torch.futures.Future()
            done.set_result(flat)
            return done

        model = DDP(model, process_group=group)
        model.register_comm_hook(None, hook)
        return model

    def step(self, model, batch, ctx):
        rows = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        (two_losses(*model(rows["x"]), rows) / ROWS).backward()


class Buggy(Clean):
    blocks = staticmethod(blocks_down)


EXPECT = dict(
    right=[
        r"reduc|own (part|rows|gradient)|rank'?s own|only (its|one) rank|summed",
        r"part of|elements?|rows|columns|never|not reduced|own|missing|over too few",
    ],
    place=[r"stem\.weight|stem|bucket", r"rank"],
    wrong=[
        r"forward is (wrong|right up to)|forward goes wrong",
        r"backward of .{0,30}(is|goes) wrong",
        r"(own|local) (count|denominator|divisor)",
        r"(all|every) parameters? (is|are) wrong|(experts|gates|towers)\S* (is|are) wrong",
        r"rows? (are |is )?(read twice|never read)",
    ],
)
WHY = (
    "The hook sums size // 96 blocks of a bucket, so the last size % 96 elements are never reduced: there every rank keeps its own rows' gradient. "
    "It is the end of the bucket that is wrong, 71 of 647 elements: stem.weight but for its first 9 elements; all else is right. Forward, "
    "backward, the losses with their weights and the divisor are right."
)
