"""AlphaFold's outer product mean over a masked alignment whose sequences are dealt to three
ranks (dynamic axial parallelism), followed by a pair head that all ranks compute.

The mean divides each pair of columns (i, j) by the number of sequences that have both. The step
all-reduces the number of sequences per column, a vector in place of a matrix, and makes the
pair's number from it as if gaps were independent. After message-saving rewrites of the norm term
in distributed Evoformer code.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dap": 3}}}}
SEQS, COLS, BINS = 8, 5, 4


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class PairModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(21, 7)
        self.transition = nn.Sequential(
            nn.LayerNorm(7), nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 7)
        )
        self.left = nn.Linear(7, 3)
        self.right = nn.Linear(7, 3)
        self.out = nn.Linear(9, 11)
        self.bins = nn.Linear(11, BINS)

    def outer(self, msa, mask):
        h = self.embed(msa)
        h = h + self.transition(h)
        a, b = self.left(h) * mask[..., None], self.right(h) * mask[..., None]
        return torch.einsum("bsic,bsjd->bijcd", a, b).flatten(-2)

    def head(self, mean):
        return self.bins(torch.relu(self.out(mean)))

    def forward(self, msa, mask):
        both = torch.einsum("bsi,bsj->bij", mask, mask)
        return self.head(self.outer(msa, mask) / (both + 1e-3)[..., None])


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(131 + self.seed)
        return PairModel()

    def batch(self):
        g = torch.Generator().manual_seed(141 + self.seed)
        mask = (torch.rand(5, SEQS, COLS, generator=g) < 0.7).float()
        mask[:, 0] = 1.0
        return {
            "msa": torch.randint(21, (5, SEQS, COLS), generator=g),
            "mask": mask,
            "distance": torch.randint(BINS, (5, COLS, COLS), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["msa"], rows["mask"])
        loss = F.cross_entropy(logits.flatten(0, 2), rows["distance"].flatten(), reduction="sum")
        return loss, rows["distance"].numel()

    def pair_counts(self, mask, group):
        """How many sequences of the whole alignment have both columns."""
        both = torch.einsum("bsi,bsj->bij", mask, mask)
        dist.all_reduce(both, group=group)
        return both

    def step(self, model, batch, ctx):
        group = ctx.group("dap")
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        msa, mask = (batch[k].tensor_split(world, 1)[rank] for k in ("msa", "mask"))
        total = SumOverRanks.apply(model.outer(msa, mask), group)
        logits = model.head(total / (self.pair_counts(mask, group) + 1e-3)[..., None])
        F.cross_entropy(logits.flatten(0, 2), batch["distance"].flatten()).backward()
        for name, p in model.named_parameters():
            if not name.startswith(("out.", "bins.")):
                dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def pair_counts(self, mask, group):
        """How many sequences of the whole alignment have both columns."""
        column = mask.sum(1)
        dist.all_reduce(column, group=group)
        depth = torch.tensor(mask.shape[1])
        dist.all_reduce(depth, group=group)
        return column[:, :, None] * column[:, None, :] / depth


EXPECT = {
    "right": [
        r"pair|both columns|co-?occur|joint|outer product|norm|divisor|denominator",
        (
            r"product of (the )?(\w+ )?(column|marginal|count|mask|number|sum)|n_?i \* n_?j|"
            r"independen|marginal|per.?column|column counts?|factori[sz]|column\[|"
            r"column sums?|separately|instead of (the )?(pairwise|joint)"
        ),
    ],
    "place": [r"pair_counts", r"\bcolumn\b", r"outer product mean", r"\bdepth\b", r"\bboth\b"],
    "wrong": [
        r"own (sequences|count|depth)|local (count|norm|depth|mask)|not (all-?)?reduced",
        r"mask(ed)? (is )?(not applied|missing|applied twice)",
        r"(out|bins|head)\S* (gradients? )?(is |are )?(reduced|summed|counted) (twice|three)",
        r"epsilon|1e-3",
        r"uneven|divided by (the )?world",
    ],
}

WHY = (
    "The outer product mean of columns i and j is divided by the number of sequences in which "
    "neither has a gap, the sum over s of mask[s,i] * mask[s,j]. The step reduces only the "
    "per-column counts and uses n_i * n_j / S, which is that number just if gaps are "
    "independent; on the diagonal it is n_i^2 / S instead of n_i. The sums over ranks are "
    "right but the divisor is not, so the forward and practically all gradients are wrong, on "
    "all ranks alike. A right cause says that the pair norm is made of the product of column "
    "counts instead of the joint count. Fix: all-reduce the pairwise counts."
)
