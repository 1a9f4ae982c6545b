"""Speech recogniser with CTC under DDP on two ranks, two uneven micro-batches each (no_sync for the first): a small convolutional encoder, log-softmax, and for the rows of language 1 label priors taken off the log-probabilities (scale
0.4) before the CTC loss. The clean step computes CTC with an own forward recursion in log space, the faulty one with F.ctc_loss. The divisor is the number of labels of the whole batch.

The bug: torch's ctc_loss returns as gradient exp(log_probs) minus the posterior, which holds only if log_probs are straight out of log_softmax. With priors taken off they do not sum to one, the loss is right and the gradient is not. As
in pytorch issues #122243 (label priors; forward correct, backward not), #52241, #127608 and #82545.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
BINS, WIDTH, UNITS, FRAMES, MOST, SCALE = 4, 7, 6, 10, 3, 0.4
PARTS = [[(0, 2), (2, 5)], [(5, 6), (6, 8)]]
FRAMES_OF = [10, 7, 9, 10, 8, 6, 10, 9]
LABELS_OF = [3, 1, 2, 3, 2, 2, 3, 1]
LANGUAGE = [1, 0, 1, 0, 1, 1, 0, 0]
FAR = -1e9


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Conv1d(BINS, WIDTH, 3, padding=1)
        self.mixer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, UNITS)
        self.register_buffer("prior", torch.tensor([0.55, 0.2, 0.1, 0.08, 0.05, 0.02]).log())

    def forward(self, sound, language):
        h = torch.tanh(self.encoder(sound).transpose(1, 2))
        scores = self.head(F.silu(self.mixer(h))).log_softmax(-1)
        return scores - SCALE * language[:, None, None] * self.prior


def ctc_by_recursion(scores, label, frames, labels):
    total = 0
    for row, t_end, n in zip(range(len(scores)), frames.tolist(), labels.tolist()):
        path = torch.zeros(2 * n + 1, dtype=torch.long)
        path[1::2] = label[row, :n]
        skip = torch.zeros(2 * n + 1, dtype=torch.bool)
        skip[3::2] = path[3::2] != path[1:-2:2]
        s = scores[row][:, path]
        far = s.new_full((2,), FAR)
        alpha = torch.cat([s[0, :2], s.new_full((2 * n - 1,), FAR)])
        for t in range(1, t_end):
            stay, one = alpha, torch.cat([far[:1], alpha[:-1]])
            two = torch.where(skip, torch.cat([far, alpha[:-2]]), alpha.new_tensor(FAR))
            alpha = torch.logsumexp(torch.stack([stay, one, two]), 0) + s[t]
        total = total - torch.logsumexp(alpha[-2:], 0)
    return total


def ctc_of_torch(scores, label, frames, labels):
    return F.ctc_loss(scores.transpose(0, 1), label, frames, labels, reduction="sum")


class Clean:
    ctc = staticmethod(ctc_by_recursion)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(FRAMES_OF)
        return {
            "sound": torch.randn(rows, BINS, FRAMES, generator=g),
            "label": torch.randint(1, UNITS, (rows, MOST), generator=g),
            "frames": torch.tensor(FRAMES_OF),
            "labels": torch.tensor(LABELS_OF),
            "language": torch.tensor(LANGUAGE),
        }

    def loss_sum(self, model, rows):
        scores = model(rows["sound"], rows["language"])
        loss = ctc_by_recursion(scores, rows["label"], rows["frames"], rows["labels"])
        return loss, int(rows["labels"].sum())

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        count = int(batch["labels"].sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                scores = model(rows["sound"], rows["language"])
                loss = self.ctc(scores, rows["label"], rows["frames"], rows["labels"])
                (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    ctc = staticmethod(ctc_of_torch)


EXPECT = dict(
    right=[
        r"(?i)ctc|loss|head|scores|log.?prob",
        r"(?i)backward|gradient (of|that|at|into|hand)|hands? (back|on)|derivative|adjoint",
        r"(?i)ctc|rows?|normali[sz]|prior|language|loss.{0,40}(gradient|derivative|backward)|"
        r"derivative of the loss",
    ],
    place=[r"(?i)ctc|loss|head|scores|log.?prob"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(never|not) (been )?(all.?)?reduced|reduced (twice|again)|no_sync.{0,40}(wrong|"
        r"missing)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)padding|frames? .{0,20}(too many|beyond)|labels? .{0,20}(is|are) (wrong|of|shifted)",
        r"(?i)(encoder|mixer)(\.(weight|bias))?('s)? backward|all rows .{0,20}wrong",
    ],
)
WHY = (
    "The forward and the loss are right in all rows. F.ctc_loss hands back exp(scores) minus the posterior; the first term vanishes in the backward of log_softmax only if exp(scores) sums to one per frame. Rows of language 0 (1, "
    "3, 6, 7) have no prior and are right. Rows of language 1 (rank 0: row 0 in micro-batch 0, rows 2 and 4 in micro-batch 1; rank 1: row 5 in micro-batch 0) have scores minus 0.4 log prior, and exp of it is a wrong addition to "
    "the gradient of the scores in every frame within the length. So head, mixer and encoder are wrong in direction, alike on both ranks after DDP's average. Rank 1's micro-batch 1 is right. Divisor 17, no_sync, reduction are "
    "right. Fix: a CTC with the gradient of its own (recursion by autograd), or give log_softmax(scores) to ctc_loss and take the normalisers off the loss apart."
)
