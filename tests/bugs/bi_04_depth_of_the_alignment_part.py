"""A small MSA Transformer: masked residues of multiple sequence alignments are predicted with tied row attention, whose scores are summed over the sequences of the alignment before the softmax. Two data ranks times two ranks that share
an alignment (three and two of its five sequences), two micro-batches each; the scores are summed over the second axis with an all-reduce in both directions.

The bug: the sum is divided by the square root of width and number of sequences, and that number is taken from the tensor at hand, which is the rank's part. After the tied attention of facebookresearch/esm (MSA Transformer) and
lucidrains/alphafold2 PR 62 (allow for tied row attention with uneven number of MSAs).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "msa": 2}}}}
RESIDUES, LENGTH, DEPTH, WIDTH, HEADS, ROWS = 8, 6, 5, 8, 2, 7
MASK = RESIDUES
PARTS = [[(0, 1), (1, 3)], [(3, 5), (5, 7)]]
SEQUENCES = [(0, 3), (3, 5)]


class SumScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, group):
        ctx.group = group
        scores = scores.clone()
        dist.all_reduce(scores, group=group)
        return scores

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class TiedRowAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.group, self.depth = None, None

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(3)
        scaling = q.shape[-1] ** -0.5 * (self.depth or x.shape[1]) ** -0.5
        scores = torch.einsum("bmihd,bmjhd->bhij", q * scaling, k)
        if self.group is not None:
            scores = SumScores.apply(scores, self.group)
        y = torch.einsum("bhij,bmjhd->bmihd", scores.softmax(-1), v)
        return self.out(y.flatten(3))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(RESIDUES + 1, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.5)
        self.first, self.second = TiedRowAttention(), TiedRowAttention()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.wide = nn.Sequential(nn.Linear(WIDTH, 12), nn.SiLU(), nn.Linear(12, WIDTH))
        self.residue = nn.Linear(WIDTH, RESIDUES)
        with torch.no_grad():
            for attention in (self.first, self.second):
                attention.qkv.weight.mul_(2.5)

    def forward(self, tokens):
        x = self.embed(tokens) + self.places
        x = x + self.first(self.norms[0](x))
        x = x + self.wide(x)
        x = x + self.second(self.norms[1](x))
        return self.residue(self.norms[2](x))


def masked_loss(model, tokens, hidden):
    logits = model(tokens.masked_fill(hidden, MASK))
    return F.cross_entropy(logits[hidden], tokens[hidden], reduction="sum")


class Clean:
    depth = DEPTH

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        hidden = torch.rand(ROWS, DEPTH, LENGTH, generator=g) < 0.3
        hidden[:, ::3, 0] = True
        return {
            "tokens": torch.randint(RESIDUES, (ROWS, DEPTH, LENGTH), generator=g),
            "hidden": hidden,
        }

    def loss_sum(self, model, rows):
        return masked_loss(model, rows["tokens"], rows["hidden"]), int(rows["hidden"].sum())

    def distribute(self, model, ctx):
        for attention in (model.first, model.second):
            attention.group, attention.depth = ctx.group("msa"), self.depth
        return model

    def step(self, model, batch, ctx):
        low, high = SEQUENCES[ctx.coords["msa"]]
        total = int(batch["hidden"].sum())
        model.zero_grad()
        for a, b in PARTS[ctx.coords["dp"]]:
            tokens, hidden = batch["tokens"][a:b, low:high], batch["hidden"][a:b, low:high]
            (masked_loss(model, tokens, hidden) / total).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp", "msa"))


class Buggy(Clean):
    depth = None


EXPECT = dict(
    right=[
        r"(?i)first|TiedRowAttention|attention|scores|scaling|softmax|SumScores",
        r"(?i)scal|times|factor|depth|shape\[1\]|divi|sqrt|multipl|number of sequences|own|local|mul\b|\*\*",
    ],
    place=[r"(?i)\bfirst\b|TiedRowAttention|scaling|scores|depth|SumScores"],
    wrong=[
        r"(?i)(sum|reduc\w*) over msa is missing|not (been )?(all.?)?reduced|(reduced|summed|counted) twice",
        r"(?i)loss.{0,30}(divi(ded|des) by (its|their) own|wrong divisor)|mean of means",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)embed .{0,20}goes wrong|places .{0,20}(goes|is) wrong|softmax over (its|the) own",
        r"(?i)only (on )?rank [0123]\b|recomput|labels? .{0,20}(is|are) wrong|SumScores.{0,40}(backward|adjoint) (is )?wrong",
    ],
)
WHY = (
    "TiedRowAttention scales the queries by 1 / sqrt(head width * number of sequences). On the ranks x.shape[1] is the rank's own part: 3 sequences on msa coordinate 0 (ranks 0, 2) and 2 on msa coordinate 1 (ranks 1, 3), instead of 5. "
    "So the scores that go into the all-reduce are sqrt(5/3) times and sqrt(5/2) times what they should be; the sum over msa mixes both, and the softmax is sharper than in the single process, equally on both ranks of an alignment. "
    "The forward goes wrong in `first` (its scores), and again in `second`; all rows, micro-batches, ranks. SumScores, its backward, the reduction over dp and msa and the divisor (masked residues) are right. Fix: the number of all "
    "sequences (5, or the all-reduced number) in the scaling."
)
