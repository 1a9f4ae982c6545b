"""Potts model of a protein family (pseudo-likelihood), its sites dealt out to the ranks.

The couplings are one tensor J[site, letter, site, letter]; only their symmetric part means
something. Each rank computes the conditional log-probabilities of its own sites given all others,
for the full batch, and the gradients are summed over the ranks.

The bug: the part that is mirrored into the own rows, J[j, b, i, a], is taken with a permutation
that exchanges the sites but leaves the letters where they are: J[j, a, i, b]. After direct
coupling analysis codes (GREMLIN, CCMpred ports) where the symmetrisation was rewritten for a
block of rows.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"sites": 3}}}}

ROWS, SITES, LETTERS = 7, 8, 5


class Potts(nn.Module):
    def __init__(self):
        super().__init__()
        self.fields = nn.Parameter(torch.randn(SITES, LETTERS) * 0.3)
        self.couplings = nn.Parameter(torch.randn(SITES, LETTERS, SITES, LETTERS) * 0.3)
        self.log_beta = nn.Parameter(torch.tensor(-0.2))

    def symmetric_rows(self, lo, hi):
        own = self.couplings[lo:hi]
        mirrored = self.couplings[:, :, lo:hi].permute(2, 3, 0, 1)
        return 0.5 * (own + mirrored)

    def conditional(self, letters, lo, hi):
        rows = self.symmetric_rows(lo, hi)
        other = torch.arange(lo, hi)[:, None] != torch.arange(SITES)
        rows = rows * other[:, None, :, None].to(rows.dtype)
        seen = nn.functional.one_hot(letters, LETTERS).to(rows.dtype)
        logits = self.fields[lo:hi] + torch.einsum("iajb,njb->nia", rows, seen)
        return (self.log_beta.exp() * logits).log_softmax(-1)

    def forward(self, letters, weight, lo, hi):
        chosen = self.conditional(letters, lo, hi).gather(-1, letters[:, lo:hi, None]).squeeze(-1)
        return -(chosen.sum(-1) * weight).sum()


class BlockPotts(Potts):
    def symmetric_rows(self, lo, hi):
        return 0.5 * (self.couplings[lo:hi] + self.couplings[:, :, lo:hi].permute(2, 1, 0, 3))


class Clean:
    parallel_class = Potts

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(41 + self.seed)
        return Potts()

    def batch(self):
        g = torch.Generator().manual_seed(42 + self.seed)
        return {
            "letters": torch.randint(0, LETTERS, (ROWS, SITES), generator=g),
            "weight": torch.rand(ROWS, generator=g) + 0.5,
        }

    def loss_sum(self, model, rows):
        return model(rows["letters"], rows["weight"], 0, SITES), rows["letters"].shape[0]

    def distribute(self, model, ctx):
        model.__class__ = self.parallel_class
        return model

    def step(self, model, batch, ctx):
        group = ctx.group("sites")
        rank, world = ctx.coords["sites"], dist.get_world_size(group)
        sites = torch.tensor_split(torch.arange(SITES), world)[rank]
        lo, hi = int(sites[0]), int(sites[-1]) + 1
        pieces = zip(
            torch.tensor_split(batch["letters"], 2),
            torch.tensor_split(batch["weight"], 2),
            strict=True,
        )
        for letters, weight in pieces:
            (model(letters, weight, lo, hi) / ROWS).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)


class Buggy(Clean):
    parallel_class = BlockPotts


EXPECT = dict(
    right=[
        r"symmetri|mirror|transpos|permut",
        (
            r"letter|state|amino|second (and|/) (fourth|4th)|dim(ension)?s? (1|3)|permute\(2, ?1, "
            r"?0, ?3\)|\(2, ?3, ?0, ?1\)|only the sites|a and b"
        ),
    ],
    place=[r"symmetric_rows", r"BlockPotts", r"couplings", r"permute"],
    wrong=[
        r"all[-_ ]?reduce|summed (over|across) ranks|world|divis(or|ion)",
        r"diagonal|self[- ]coupling|own site",
        r"(only|just) the own (rows|block)|half (the|of the) couplings (is|are) (missing|not)",
        r"micro-?batch",
    ],
)

WHY = (
    "The symmetric part of the couplings is (J[i,a,j,b] + J[j,b,i,a]) / 2, so the mirrored "
    "block must exchange the sites and with them the letters: permute(2, 3, 0, 1). "
    "BlockPotts uses permute(2, 1, 0, 3), which exchanges the sites alone and adds "
    "J[j,a,i,b]; the shapes are the same, so nothing complains. The half of the gradient of "
    "`couplings` that goes through the mirrored block lands on transposed letters, and since "
    "the logits change all gradients (fields and log_beta too) are off; sites, divisor and "
    "the sum over ranks are right. A right cause says that the symmetrisation transposes the "
    "sites without the letters (wrong permutation). The fix is permute(2, 3, 0, 1)."
)
