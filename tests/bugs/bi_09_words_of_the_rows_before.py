"""Unlikelihood training of a small language model: besides the likelihood of the next token, tokens that were there before are made unlikely (but not the target itself). Two data ranks times two tensor ranks (DTensor: the MLP is cut
by columns and rows, everything else is the same on both), two micro-batches each; gradients are summed over the data ranks. The divisor is the number of target tokens.

The bug: all targets of a micro-batch are laid in one line, and the tokens before are all that stand before in that line, those of the rows before included. After facebookresearch/unlikelihood_training issue 11 (Maybe the BUG of the
token-level unlikelyhood training loss).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
VOCABULARY, TOKENS, WIDTH, PAD = 13, 6, 8, 0
LENGTHS = [6, 4, 5, 3, 6, 5, 4, 6, 5]
PARTS = [[(0, 3), (3, 4)], [(4, 6), (6, 9)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blend = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)
        self.norm, self.words = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.blend(self.embed(ids))[0]
        x = x + self.down(F.silu(self.up(x)))
        return self.words(self.norm(x))


def earlier_words(target, by_row):
    """Which words (columns) stood before each target of the line."""
    line = target.flatten()
    before = torch.ones(len(line), len(line), dtype=torch.bool).tril(-1)
    if by_row:
        row = torch.arange(len(line)) // target.shape[1]
        before = before & (row[:, None] == row)
    before = before & (line[:, None] != line) & (line != PAD)
    words = F.one_hot(line, VOCABULARY)
    return (before.long()[:, :, None] * words).sum(1) > 0


def text_loss(model, rows, by_row=True):
    target = rows["ids"][:, 1:]
    logs = model(rows["ids"][:, :-1]).flatten(0, 1).log_softmax(-1)
    likely = F.nll_loss(logs, target.flatten(), ignore_index=PAD, reduction="sum")
    avoid = earlier_words(target, by_row) & (target.flatten() != PAD)[:, None]
    unlikely = -torch.log1p(-logs.exp().clamp(max=1 - 1e-5)) * avoid
    return likely + unlikely.sum()


class Clean:
    by_row = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(1, VOCABULARY, (len(LENGTHS), TOKENS), generator=g)
        beyond = torch.arange(TOKENS) >= torch.tensor(LENGTHS)[:, None]
        return {"ids": ids.masked_fill(beyond, PAD)}

    def loss_sum(self, model, rows):
        return text_loss(model, rows), int((rows["ids"][:, 1:] != PAD).sum())

    def distribute(self, model, ctx):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return parallelize_module(model, ctx.mesh["tp"], plan)

    def step(self, model, batch, ctx):
        total = int((batch["ids"][:, 1:] != PAD).sum())
        model.zero_grad()
        for low, high in PARTS[ctx.coords["dp"]]:
            rows = {"ids": batch["ids"][low:high]}
            (text_loss(model, rows, by_row=self.by_row) / total).backward()
        for p in model.parameters():
            grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            dist.all_reduce(grad, group=ctx.group("dp"))


class Buggy(Clean):
    by_row = False


EXPECT = dict(
    right=[
        r"(?i)loss|avoid|unlikely|earlier_words|words|logits|before|mask",
        r"(?i)avoid|earlier_words|by_row|mask|other (rows|words|tokens|targets)|more (words|numbers|tokens|elements)|"
        r"elements|another (loss|gradient|formula)|second argument|multipl|mul\b|classes|candidates|rows? before|"
        r"(gradient|loss) (at|of) .{0,30}(tokens|rows|places|positions)",
    ],
    place=[r"(?i)avoid|earlier_words|unlikely|text_loss|by_row|from the loss|after words|words"],
    wrong=[
        r"(?i)forward .{0,20}goes wrong in (embed|blend|up|down|norm|words)",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|summed over tp",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)only (on )?rank [0123]\b|recomput|all rows are wrong|first row .{0,25}wrong",
    ],
)
WHY = (
    "All modules' outputs, logits included, are right. In earlier_words the targets of all rows of a micro-batch lie in one line, and without the test for the same row the earlier words of a target are those of its own row and of all rows "
    "before it in the micro-batch (except the target itself and padding). So the mask `avoid` has too many words for the targets of the second and later rows of a micro-batch: global rows 1, 2 (dp 0, ranks 0 and 1), rows 5, 7, 8 (dp 1, ranks "
    "2 and 3); the first row of each micro-batch (0, 3, 4, 6) is right, and so the second micro-batch of dp 0 (row 3 alone). The unlikelihood term has too many summands there, and the gradient at these logits is wrong. The likelihood term, tensor "
    "parallelism, reduction over dp, divisor are right. Fix: before & (row[:, None] == row)."
)
