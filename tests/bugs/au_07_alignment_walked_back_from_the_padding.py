"""Text to speech with a soft-DTW loss under DDP on three ranks with two uneven micro-batches each (no_sync for the first): predicted and recorded frames have different lengths in every row and are padded in the batch. The recursion
is a custom autograd Function on the padded cost matrices; the forward reads the value at the end of each row, R[n, m]. The divisor is the number of rows of all ranks.

The bug: the backward starts at the last corner of the padded matrix for all rows, as the version for equal lengths does; only the forward was changed for unequal lengths. The question of Maghoumi/pytorch-softdtw-cuda issue 11
(batch of variable sequence length: the forward is easy, "but I'm not sure what to do with the backward function").
"""

import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
FRAMES, HEARD, WIDTH, MEL, WORDS, GAMMA = 5, 6, 8, 3, 9, 0.7
PARTS = [[(0, 2), (2, 3)], [(3, 4), (4, 6)], [(6, 8), (8, 9)]]
SAID_LENGTH = [5, 3, 5, 4, 5, 2, 5, 5, 4]
HEARD_LENGTH = [6, 6, 6, 4, 6, 5, 6, 3, 6]


def soft_min(*values):
    return -GAMMA * torch.logsumexp(-torch.stack(values) / GAMMA, 0)


def table(cost):
    """R of shape rows, n + 1, m + 1 by the soft-DTW recursion."""
    rows, n, m = cost.shape
    far = torch.full_like(cost[:, 0, 0], 1e6)
    line = [torch.zeros_like(far)] + [far] * m
    lines = [line]
    for i in range(n):
        new = [far]
        for j in range(m):
            new.append(cost[:, i, j] + soft_min(line[j], line[j + 1], new[j]))
        line = new
        lines.append(line)
    return torch.stack([torch.stack(line, -1) for line in lines], 1)


def way_back(cost, value):
    """Derivative of value[-1, -1] by the costs of one row (cost n x m, value n+1 x m+1)."""
    n, m = cost.shape
    grad = torch.zeros_like(cost)
    grad[-1, -1] = 1
    for i in reversed(range(n)):
        for j in reversed(range(m)):
            for di, dj in ((1, 0), (0, 1), (1, 1)):
                k, q = i + di, j + dj
                if k < n and q < m:
                    gap = value[k + 1, q + 1] - cost[k, q] - value[i + 1, j + 1]
                    grad[i, j] += grad[k, q] * torch.exp(gap / GAMMA)
    return grad


class SoftDTW(torch.autograd.Function):
    """Soft-DTW of every row, from padded costs and the lengths of both sides."""

    @staticmethod
    def forward(ctx, cost, said, heard, from_the_corner):
        value = table(cost)
        ctx.save_for_backward(cost, value, said, heard)
        ctx.from_the_corner = from_the_corner
        return value[torch.arange(len(said)), said, heard]

    @staticmethod
    def backward(ctx, grad_out):
        cost, value, said, heard = ctx.saved_tensors
        grad = torch.zeros_like(cost)
        for row, (n, m) in enumerate(zip(said.tolist(), heard.tolist())):
            if ctx.from_the_corner:
                n, m = cost.shape[1:]
            grad[row, :n, :m] = way_back(cost[row, :n, :m], value[row, : n + 1, : m + 1])
        return grad * grad_out[:, None, None], None, None, None


class Speaker(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(FRAMES, WIDTH) * 0.5)
        self.hidden, self.mel = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, MEL)

    def forward(self, text):
        return self.mel(torch.tanh(self.hidden(self.embed(text) + self.places)))


def costs(model, rows):
    said = model(rows["text"])
    return (said[:, :, None] - rows["recorded"][:, None].to(said.dtype)).square().sum(-1)


class Clean:
    from_the_corner = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Speaker()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(SAID_LENGTH)
        heard = torch.tensor(HEARD_LENGTH)
        recorded = torch.randn(rows, HEARD, MEL, generator=g)
        there = torch.arange(HEARD)[None] < heard[:, None]
        return {
            "text": torch.randint(WORDS, (rows, FRAMES), generator=g),
            "said": torch.tensor(SAID_LENGTH),
            "recorded": recorded * there[..., None],
            "heard": heard,
        }

    def loss_sum(self, model, rows):
        value = table(costs(model, rows))
        at_the_end = value[torch.arange(len(value)), rows["said"], rows["heard"]]
        return at_the_end.sum(), len(value)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                value = SoftDTW.apply(
                    costs(model, rows), rows["said"], rows["heard"], self.from_the_corner
                )
                (value.sum() * ctx.world_size / len(SAID_LENGTH)).backward()


class Buggy(Clean):
    from_the_corner = True


EXPECT = dict(
    right=[
        r"(?i)backward|adjoint|gradient (of|that|at|behind|sent|handed|into|from)|derivative|hands? back|way back",
        r"(?i)soft.?dtw|loss|cost|align|output|mel\b|Function|logits|prediction",
    ],
    place=[r"(?i)soft.?dtw|loss|cost|mel\b|output|Function"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward|loss value (is|are) wrong",
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted twice|no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)backward of (embed|hidden|tanh|places)[^.]{0,30}is wrong",
        r"(?i)(recorded|targets?|labels?|lengths?) (is|are) (wrong|of other)",
        r"(?i)(all|every) rows? .{0,20}wrong|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only (on )?rank [012]\b",
    ],
)
WHY = (
    "The forward and the loss are right everywhere; the own backward of SoftDTW is wrong for rows that are shorter than the padded size 5 x 6: row 1 (3 x 6; rank 0, micro-batch 0), row 3 (4 x 4; rank 1, micro-batch 0), row 5 (2 x "
    "5; rank 1, micro-batch 1), row 7 (5 x 3; rank 2, micro-batch 0) and row 8 (4 x 6; rank 2, micro-batch 1). It returns the derivative of R[5, 6], the alignment with the padding, instead of R[n, m]. Rows 0, 2, 4, 6 (full length)"
    " are right. The gradients of all parameters (mel, hidden, embed, places) are wrong, equally on all ranks after DDP's average. Divisor 9, no_sync, reduction, the data are right. Fix: start at (n, m) of each row and leave "
    "everything beyond at zero."
)
