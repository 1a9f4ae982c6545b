"""Memory of a temporal graph network under DDP on three ranks, two micro-batches each (no_sync for the first): every row is a stream of six events, each with a node and features; the memory of a node is the message of its last event (a
learned start value if it has none), written with Tensor.scatter in the order of events, and pairs of nodes are scored from the memory.

The bug: in some streams a node has several events, so scatter gets the same index twice. The forward on the CPU is right (the last write stays), but the backward of scatter gives the slot's gradient to every message written to it,
those that were written over included. As in pytorch issue #146299 (PutBackward0, IndexPutBackward0 and ScatterBackward0 with repeated indices), PR #49679 (docs: the gradient is incorrect when indices are not unique) and issue #31776.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
NODES, EVENTS, FEATURES, WIDTH, PAIRS = 6, 6, 4, 5, 3
PARTS = [[(0, 2), (2, 3)], [(3, 4), (4, 6)], [(6, 8), (8, 9)]]
STREAMS = [
    [0, 1, 2, 1, 3, 0],
    [5, 4, 3, 2, 1, 0],
    [2, 2, 2, 4, 5, 4],
    [1, 0, 3, 2, 5, 4],
    [3, 5, 1, 0, 2, 4],
    [4, 1, 0, 5, 3, 2],
    [0, 1, 2, 3, 4, 5],
    [5, 3, 5, 3, 1, 3],
    [2, 4, 0, 1, 3, 5],
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.nodes = nn.Embedding(NODES, WIDTH)
        self.message = nn.Linear(FEATURES + WIDTH, WIDTH)
        self.start = nn.Parameter(torch.randn(NODES, WIDTH) * 0.5)
        self.score = nn.Bilinear(WIDTH, WIDTH, 1)
        self.by_scatter = False

    def forward(self, features, node, pair):
        sent = torch.tanh(self.message(torch.cat([features, self.nodes(node)], -1)))
        start = self.start.expand(len(node), -1, -1)
        if self.by_scatter:
            slot = node[..., None].expand(-1, -1, WIDTH)
            memory = start.scatter(1, slot, sent)
        else:
            hits = node[:, None, :] == torch.arange(NODES)[None, :, None]
            last = (hits * torch.arange(1, EVENTS + 1)).amax(2)
            place = (last - 1).clamp(min=0)[..., None].expand(-1, -1, WIDTH)
            memory = torch.where(last[..., None] > 0, sent.gather(1, place), start)
        a, b = (
            memory.gather(1, pair[..., k, None].expand(-1, -1, WIDTH)).contiguous() for k in (0, 1)
        )
        return self.score(a, b).squeeze(-1)


class Clean:
    by_scatter = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(STREAMS)
        first = torch.arange(PAIRS).expand(rows, -1)
        return {
            "features": torch.randn(rows, EVENTS, FEATURES, generator=g),
            "node": torch.tensor(STREAMS),
            "pair": torch.stack([first, first + 3], -1),
            "linked": torch.randint(2, (rows, PAIRS), generator=g),
        }

    def loss_sum(self, model, rows):
        score = model(rows["features"], rows["node"], rows["pair"])
        linked = rows["linked"].to(score.dtype)
        loss = F.binary_cross_entropy_with_logits(score, linked, reduction="sum")
        return loss, linked.numel()

    def distribute(self, model, ctx):
        model.by_scatter = self.by_scatter
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        count = batch["linked"].numel()
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss, _ = self.loss_sum(model, rows)
                (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    by_scatter = True


EXPECT = dict(
    right=[
        r"(?i)scatter|message|memory|slot|index|nodes",
        r"(?i)backward|gradient (that|of|to|hand)|hands? (back|on)|adjoint",
        r"(?i)repeat|duplicat|twice|several|overwritten|written over|adjoint|wrong|"
        r"not (the )?(gradient|adjoint)",
    ],
    place=[r"(?i)scatter|message|memory|nodes"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(start|score)(\.(weight|bias))? .{0,15}(is|are|goes) wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|(parameter|gradient)s? .{0,20}reduced (twice|"
        r"again)|no_sync.{0,40}(wrong|missing)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read)",
        r"(?i)all (three )?ranks .{0,20}wrong|only (on )?rank 1\b|rank 1 .{0,20}wrong",
    ],
)
WHY = (
    "Streams 0, 2 and 7 have nodes with several events: row 0 (rank 0, micro-batch 0: nodes 0 and 1 twice), row 2 (rank 0, micro-batch 1: node 2 three times, 4 twice), row 7 (rank 2, micro-batch 0: node 5 twice, 3 three times). "
    "The memory, scores and loss are right. In the backward of scatter the messages of the events that were written over (row 0: events 0, 1; row 2: events 0, 1, 3; row 7: events 0, 1, 3) get the gradient of their node's slot as "
    "well, where zero is right. So message.weight, message.bias and nodes.weight are wrong on the local gradients of rank 0 (both micro-batches) and rank 2 (micro-batch 0), and after DDP's average alike on all ranks; rank 1's part "
    "is right. start and score are right, and so are no_sync, the divisor 27 and the reduction. Fix: find each node's last event and gather its message, or mask the others before scatter."
)
