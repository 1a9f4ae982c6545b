"""Token classifier under DDP on three ranks with rows of different length and three micro-batches (no_sync for the first two). A communication hook does the weighting by tokens: it is told the number of tokens of a micro-batch,
multiplies the bucket by it, divides by the tokens of the whole batch and sums over the ranks.

The bug: the loss of a micro-batch is a mean over its own tokens, and the hook puts the tokens back with one factor for all that is in the bucket. Under no_sync the bucket holds the sum over three micro-batches, the hook knows the
count of the last one. Compare pytorch/pytorch PR 48670/49418 (state of a hook and what a bucket contains), ml-explore/mlx-lm PR 1413 (weight micro-batches by token count).
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
TOKENS, VOCABULARY, WIDTH, CLASSES = 6, 9, 6, 4
PARTS = [[(0, 2), (2, 3), (3, 4)], [(4, 5), (5, 7), (7, 8)], [(8, 9), (9, 10), (10, 12)]]
LENGTHS = [6, 5, 2, 4, 1, 6, 3, 5, 6, 2, 4, 5]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.norm(x + F.silu(self.mix(x))))


class Weights:
    """What the hook knows: tokens (of the micro-batch that is under way) and of the batch."""

    def __init__(self, group):
        self.group, self.tokens, self.total = group, 1, 1


def weighted_sum(state, bucket):
    buffer = bucket.buffer().mul_(state.tokens / state.total)
    work = dist.all_reduce(buffer, group=state.group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class Clean:
    mean_in_loss = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(LENGTHS)
        labels = torch.randint(CLASSES, (rows, TOKENS), generator=g)
        labels[torch.arange(TOKENS)[None] >= torch.tensor(LENGTHS)[:, None]] = -100
        return {"ids": torch.randint(VOCABULARY, (rows, TOKENS), generator=g), "labels": labels}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")
        return loss, int((rows["labels"] >= 0).sum())

    def distribute(self, model, ctx):
        model = DistributedDataParallel(model, process_group=ctx.group("dp"))
        self.weights = Weights(ctx.group("dp"))
        model.register_comm_hook(self.weights, weighted_sum)
        return model

    def step(self, model, batch, ctx):
        self.weights.total = int((batch["labels"] >= 0).sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss, tokens = self.loss_sum(model, rows)
                if self.mean_in_loss:
                    loss, self.weights.tokens = loss / tokens, tokens
                loss.backward()


class Buggy(Clean):
    mean_in_loss = True


EXPECT = dict(
    right=[
        r"(?i)micro.?batch|accumulat|term|part",
        r"(?i)weight|scal|factor|count|divi|normali|coefficient|mean|tokens",
        r"(?i)last|latest|final|other|own|wrong|another|different|each|its|[0-9]/[0-9]",
    ],
    place=[r"(?i)micro.?batch|hook|bucket|loss|count|token|divi|reduc"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong|differs)",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only the last micro.?batch (is|was|arrives|counts|enters)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)padding (is|tokens are) counted|adjoint|backward of",
        r"(?i)divi(ded|des) by the world|average instead of (the )?sum|factor of (1/)?3\b",
    ],
)
WHY = (
    "Forward, local sums of the loss and reduction are right; the weights of the micro-batches are wrong. The loss of micro-batch k on rank r is a mean over its n(r, k) tokens, and the hook multiplies all that was accumulated by n(r, "
    "2), the tokens of the last micro-batch, and divides by 49, the tokens of the batch. So the gradient sum of micro-batch k enters with n(r, 2) / n(r, k) / 49 instead of 1 / 49. Tokens: rank 0: 11, 2, 4 (factors 4/11, 2, 1); rank "
    "1: 1, 9, 5 (5, 5/9, 1); rank 2: 6, 2, 9 (3/2, 9/2, 1). The last micro-batch of each rank is right, the two before it are over- or under-weighted. All parameters are wrong in direction, equally on all ranks. Fix: weight every "
    "micro-batch by its own count in its loss (sum of the loss) and let the hook divide by the batch's tokens only."
)
