"""A text classifier whose embedding gradient is divided by how often each word occurs in the batch. After pytorch's
`scale_grad_by_freq` (forum threads and issues: it counts within the mini-batch that the call sees) and FAULTS C18 (statistics of the
shard): under data parallelism with micro-batches the flag counts the words of one micro-batch of one rank.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WORDS, WIDTH, CLASSES, MICRO_BATCHES = 13, 6, 11, 7, 4, 2


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Parameter(torch.randn(WORDS, WIDTH)), nn.LayerNorm(WIDTH)
        self.conv, self.hidden = nn.Conv1d(WIDTH, 9, 3, padding=1), nn.Linear(9, 8)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, words, scaled):
        x = self.norm(F.embedding(words, self.words, scale_grad_by_freq=scaled))
        return self.out(F.gelu(self.hidden(torch.tanh(self.conv(x.mT)).amax(-1))))


class Clean:
    by_call = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Classifier()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        often = torch.linspace(1.0, 0.1, WORDS).expand(ROWS, WORDS)
        return {
            "words": torch.multinomial(often, LENGTH, replacement=True, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows, scaled=True):
        return F.cross_entropy(model(rows["words"], scaled), rows["y"], reduction="sum"), len(
            rows["y"]
        )

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for i in range(MICRO_BATCHES):
            rows = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            loss, _ = self.loss_sum(model, rows, self.by_call)
            (loss / ROWS).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
        if not self.by_call:
            counts = mine["words"].flatten().bincount(minlength=WORDS)
            dist.all_reduce(counts)
            model.words.grad /= counts.clamp(min=1)[:, None]


class Buggy(Clean):
    by_call = True


EXPECT = dict(
    right=[
        r"words",
        r"scal|factor|too (large|big)|coupl|statistic|non.?additive|own|local|frequen|count|differ\w*|times|share|micro-?batch|"
        r"per.rank|rows?",
    ],
    place=[r"words"],
    wrong=[
        r"(norm|conv|hidden|out)\.\S+ (is|are|has|have) (a )?wrong",
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"(reduced|summed) (twice|again)",
        r"forward (pass )?(is|was) wrong",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)|only the last micro-?batch",
        r"all (gradients|parameters) (is|are|was|were) wrong",
    ],
)
WHY = (
    "The flag divides each row of the embedding's gradient by the word's count in that micro-batch of that rank instead of the count "
    "in the whole batch, so words.grad is too large, by a different mixture for every word (words seen once are right), equally on "
    "all ranks. All other gradients and the forward are right."
)
