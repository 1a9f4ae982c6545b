"""Speech separation with utterance-level permutation invariant training: a mask network splits the frames of a mixture of three speakers, the loss of an utterance is the smallest over the six assignments
of the error summed over all frames. World of four: dp 2 (3 and 2 of five utterances, two micro-batches each) times time 2 (6 and 5 of eleven frames, the convolution's context is read from the data).
Gradients are summed over both axes.

The bug: each time shard chooses the assignment that is best for its own frames; the table of costs isn't summed over the time axis before the minimum, so that an utterance may have its speakers swapped
in the middle. After reports on chunked and sequence-parallel PIT losses (asteroid, speechbrain, NeMo's Sortformer), where the permutation is solved per chunk.
"""

from itertools import permutations

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "time": 2}}}}
SPEAKERS, BANDS, FRAMES, WIDTH, ROWS = 3, 4, 11, 8, 5
ORDERS = torch.tensor(list(permutations(range(SPEAKERS))))


class Separator(nn.Module):
    def __init__(self):
        super().__init__()
        self.context = nn.Conv1d(BANDS, WIDTH, 3)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.masks = nn.Linear(WIDTH, SPEAKERS * BANDS)

    def forward(self, padded):
        """Mixture with one more frame at both ends [rows, frames + 2, bands] -> sources [rows, speakers, frames, bands]."""
        h = torch.relu(self.context(padded.transpose(1, 2))).transpose(1, 2)
        h = h + torch.tanh(self.hidden(h))
        masks = 2 * torch.sigmoid(self.masks(h)).unflatten(-1, (SPEAKERS, BANDS))
        return (masks * padded[:, 1:-1, None]).transpose(1, 2)


def pair_costs(sources, targets):
    """[rows, estimated speaker, true speaker]: squared error over the frames at hand."""
    return (sources[:, :, None] - targets[:, None]).square().sum((3, 4))


def cost_of_orders(pairs):
    return pairs[:, torch.arange(SPEAKERS), ORDERS].sum(-1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Separator()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        sources = torch.randn(ROWS, SPEAKERS, FRAMES, BANDS, generator=g)
        return {"mixture": nn.functional.pad(sources.sum(1), (0, 0, 1, 1)), "sources": sources}

    def loss_sum(self, model, rows):
        pairs = pair_costs(model(rows["mixture"]), rows["sources"])
        return cost_of_orders(pairs).min(1).values.sum(), len(pairs)

    def best_orders(self, costs, ctx):
        costs = costs.detach().clone()
        dist.all_reduce(costs, group=ctx.group("time"))
        return costs.argmin(1)

    def chunk_loss(self, model, part, lo, hi, ctx):
        pairs = pair_costs(model(part["mixture"][:, lo : hi + 2]), part["sources"][:, :, lo:hi])
        costs = cost_of_orders(pairs)
        return costs.gather(1, self.best_orders(costs, ctx)[:, None]).sum()

    def step(self, model, batch, ctx):
        own = torch.arange(FRAMES).tensor_split(2)[ctx.coords["time"]]
        mine = {k: x.tensor_split(2)[ctx.coords["dp"]] for k, x in batch.items()}
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: x.tensor_split(2)[n] for k, x in mine.items()}
            (self.chunk_loss(model, part, int(own[0]), int(own[-1]) + 1, ctx) / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp", "time"))


class Buggy(Clean):
    def best_orders(self, costs, ctx):
        return costs.detach().argmin(1)


EXPECT = dict(
    right=[
        r"permut|assign|order|argmin|minim|costs?\b|best",
        r"time|own (frames|chunk|part|costs|shard)|local|per (chunk|shard|rank)|not (summed|reduced)|missing|without|before the (sum|reduction)|each rank",
    ],
    place=[r"best_orders", r"chunk_loss", r"\bcosts\b", r"argmin", r"cost_of_orders"],
    wrong=[
        r"gradients?.{0,30}(not (been )?(all.?)?reduced|reduced (twice|again))|parameters?.{0,20}never reduced",
        r"divisor|mean of means|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"over dp|dp group|wrong axis of the gradients|halo|context frame|convolution.{0,30}(border|edge|padding)",
        r"backward formula|wrong rows",
    ],
)
WHY = (
    "Buggy.best_orders takes the argmin of the costs of this rank's own frames; the costs of the six orders have to be summed over the time axis first, as the minimum is one for the utterance. For the utterances "
    "whose two halves prefer different orders at least one time shard trains on another assignment than the single process; utterances where both agree are right. The masks, the sources and the table of pair "
    "costs of the own frames are right everywhere; the loss, too small, and its gradient at the sources are wrong on the ranks whose order differs. Sums over dp and time of the gradients and the divisor are right. "
    "Fix: all-reduce the (detached) costs over the time group before argmin."
)
