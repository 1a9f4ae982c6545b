"""DDP on three ranks with a comm hook that sums every bucket by a ring of its own: in two steps every rank sends a part to the right, adds what comes from the left (reduce-scatter), and in two more steps the complete parts are handed
round (all-gather). Two or three micro-batches a rank, no_sync before the last; several small buckets, parts of unlike size.

The bug: after the first phase rank r holds the complete part r + 1, but the second phase begins with part r, of which the rank has only its own gradient. So what is handed round is not summed. In the vein of pytorch/pytorch issue 31572
(Tutorial: Wrong example of Our Own Ring-Allreduce) and NVIDIA/FasterTransformer PR 672 (indexing bug in the all-gather step of the 2-shot all-reduce).
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
FEATURES, WIDTH, CLASSES = 5, 7, 4
PARTS = [[(0, 3), (3, 4)], [(4, 5), (5, 7), (7, 9)], [(9, 12), (12, 14)]]
ROWS = 14


def exchange(out, into, rank, size):
    request = dist.isend(out.contiguous(), (rank + 1) % size)
    dist.recv(into, (rank - 1) % size)
    request.wait()


def ring_sum(flat, ahead):
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = list(flat.clone().tensor_split(size))
    for turn in range(size - 1):
        come = (rank - turn - 1) % size
        arrived = torch.empty_like(parts[come])
        exchange(parts[(rank - turn) % size], arrived, rank, size)
        parts[come] = parts[come] + arrived
    for turn in range(size - 1):
        come = (rank + ahead - turn - 1) % size
        arrived = torch.empty_like(parts[come])
        exchange(parts[(rank + ahead - turn) % size], arrived, rank, size)
        parts[come] = arrived
    return torch.cat(parts)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = F.silu(self.first(x))
        return self.head(self.norm(x + torch.tanh(self.second(x))))


class Clean:
    ahead = 1

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FEATURES, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["label"], reduction="sum"), len(rows["label"])

    def distribute(self, model, ctx):
        model = DistributedDataParallel(model, process_group=ctx.group("dp"), bucket_cap_mb=0.0004)

        def hook(state, bucket):
            done = torch.futures.Future()
            done.set_result(ring_sum(bucket.buffer(), state) / dist.get_world_size())
            return done

        model.register_comm_hook(self.ahead, hook)
        return model

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                scores = model(batch["x"][low:high])
                loss = F.cross_entropy(scores, batch["label"][low:high], reduction="sum")
                (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    ahead = 0


EXPECT = dict(
    right=[
        r"(?i)reduc|sum(med)?\b|ring|all.?gather|hook|synchroni[sz]",
        r"(?i)part|piece|chunk|slice|element|only one rank|one rank's|a single rank|"
        r"own gradient|not summed|"
        r"(some|other) ranks.{0,20}missing|without the other|bucket|hook|all.?gather",
        r"(?i)hook|ring|reduction|reduce|sum|bucket|all.?gather",
    ],
    place=[r"(?i)hook|ring|bucket|reduc|all.?gather|DDP"],
    wrong=[
        r"(?i)forward (is|goes) wrong|goes wrong in the forward|(loss|labels?) (is|are|goes) wrong",
        r"(?i)(reduced|summed|counted) (twice|again)|no_sync.{0,40}(wrong|missing)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|"
        r"only the last micro.?batch",
        r"(?i)ranks (hold|have|end with|keep) (different|unlike|their own) gradients?|"
        r"gradients differ between",
        r"(?i)backward of .{0,20}is wrong|recomput|only (the )?(head|norm|first|second)\b",
    ],
)
WHY = (
    "Forward, loss, local backward and the accumulation over the micro-batches are right on all ranks. In the hook's ring the first phase is right too: afterwards rank r holds part r + 1 of the bucket complete. The second phase "
    "starts with part r, which on rank r is still only its own gradient, and overwrites the complete parts on the way. In the end all ranks hold the same: in every bucket part 0 is rank 0's own gradient, part 1 rank 1's, part 2 rank "
    "2's, divided by three, and the contributions (rows) of the other two ranks are missing. Rank 0 has rows 0-3, rank 1 rows 4-8, rank 2 rows 9-13. The parts follow the bucket's flat elements, not the parameters, so all parameters "
    "are wrong, some in two pieces of different origin. The divisor 14 and the factor 3 against the hook's average are right. Fix: begin the second phase with part (rank + 1)."
)
