"""Sequence tagging with a linear-chain CRF under DDP on two ranks with three micro-batches each (no_sync before the last). Masked positions are padding at the end and, in sentences with words of several pieces, the pieces behind the first
in the middle of the sentence; they are to be skipped. The loss is the sum of negative log-likelihoods, divided by the valid positions of all ranks.

The bug: the score of the tagged path takes the transition from tags[i - 1] wherever position i is valid, also if i - 1 is masked (a filler tag) and the tag before is further left. The normaliser skips masked positions rightly. As in
kmkurn/pytorch-crf issue #53 (transition score for masked timesteps) and #122 (mask only supports padding).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
VOCABULARY, WIDTH, TAGS, TOKENS = 12, 5, 4, 7
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 6), (6, 9), (9, 10)]]
MASKS = [
    "1111100",
    "1111111",
    "1101100",
    "1111110",
    "1110000",
    "1111111",
    "1001101",
    "1111000",
    "1011110",
    "1111100",
]


class Crf(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.end = (nn.Parameter(torch.randn(TAGS) * 0.5) for _ in range(2))
        self.transitions = nn.Parameter(torch.randn(TAGS, TAGS) * 0.7)
        self.previous_place = False

    def path_score(self, emissions, tags, mask):
        last = tags[:, 0]
        score = self.start[last] + emissions[:, 0].gather(1, last[:, None])[:, 0]
        for i in range(1, tags.shape[1]):
            before = tags[:, i - 1] if self.previous_place else last
            here = emissions[:, i].gather(1, tags[:, i : i + 1])[:, 0]
            step = self.transitions[before, tags[:, i]] + here
            score = score + torch.where(mask[:, i], step, torch.zeros_like(step))
            last = torch.where(mask[:, i], tags[:, i], last)
        return score + self.end[last]

    def normaliser(self, emissions, mask):
        alpha = self.start + emissions[:, 0]
        for i in range(1, emissions.shape[1]):
            new = torch.logsumexp(alpha[:, :, None] + self.transitions, 1) + emissions[:, i]
            alpha = torch.where(mask[:, i, None], new, alpha)
        return torch.logsumexp(alpha + self.end, 1)

    def forward(self, emissions, tags, mask):
        return (self.normaliser(emissions, mask) - self.path_score(emissions, tags, mask)).sum()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.context = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.emit = nn.Linear(WIDTH, TAGS)
        self.crf = Crf()

    def forward(self, ids, tags, mask):
        x = F.silu(self.context(self.embed(ids).transpose(1, 2))).transpose(1, 2)
        return self.crf(self.emit(x), tags, mask)


class Clean:
    previous_place = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        mask = torch.tensor([[c == "1" for c in row] for row in MASKS])
        tags = torch.randint(1, TAGS, mask.shape, generator=g)
        return {
            "ids": torch.randint(VOCABULARY, mask.shape, generator=g),
            "tags": torch.where(mask, tags, 0),
            "mask": mask,
        }

    def loss_sum(self, model, rows):
        return model(rows["ids"], rows["tags"], rows["mask"]), int(rows["mask"].sum())

    def distribute(self, model, ctx):
        model.crf.previous_place = self.previous_place
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        valid = int(batch["mask"].sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = model(*(batch[k][low:high] for k in ("ids", "tags", "mask")))
                (loss * ctx.world_size / valid).backward()


class Buggy(Clean):
    previous_place = True


EXPECT = dict(
    right=[
        r"(?i)crf|transition",
        r"(?i)\brows? |row-wise|micro.?batch|mask|hole|skipped|loss|path|numerator|score"
        r"|forward|output",
        r"(?i)wrong|differ|other|deviat|not (the )?right|foreign|mask|previous|filler|goes wrong",
    ],
    place=[r"(?i)crf|transitions"],
    wrong=[
        r"(?i)(emit|embed|context|crf\.(start|end))\S* (is|are) wrong",
        r"(?i)goes wrong (first )?(in|at) (embed|context|emit)",
        r"(?i)(never|not) (been )?(all.?)?(reduced|summed)|(reduced|summed|counted) (twice"
        r"|again)|no_sync.{0,30}(wrong|missing)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?2\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only (on )?rank [01]\b",
        r"(?i)(normaliser|partition|denominator) .{0,15}(is )?wrong|all (ten |10 )?rows (are"
        r"|is) wrong",
    ],
)
WHY = (
    "Rows 2 (rank 0, micro-batch 1), 6 and 8 (rank 1, micro-batch 1) have masked positions inside; at the first valid position behind a hole the path score takes transitions[0, tag] (filler tag 0) instead of transitions[tag "
    "before the hole, tag]. Row 2: position 3; row 6: positions 3 and 6; row 8: position 2. The path score is linear, so only crf.transitions has a wrong gradient: -1/valid at the wrong entry (row 0 of the matrix) instead of the "
    "right one, four times, on both ranks after DDP's average. The loss value of these three rows is wrong too; emissions, start, end, embed, context, emit, the normaliser, all other rows, divisor, no_sync are right. Fix: keep "
    "the last valid tag."
)
