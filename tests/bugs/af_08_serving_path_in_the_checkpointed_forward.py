"""DDP on three ranks, two micro-batches of unlike length (no_sync for the first). Only long micro-batches (more than six tokens) checkpoint the middle block. Its attention has a serving path for passes without gradient, where keys and
values are rounded as they would be in a quantised cache; it is chosen by torch.is_grad_enabled().

The bug: the checkpoint is reentrant; its first forward runs inside a Function, with grad mode off, and so takes the serving path. The recomputation runs with grad mode on and takes the other one. The loss belongs to the rounded keys,
the backward of the block to the exact ones. As in unslothai/unsloth-zoo PR #1001 (gate on is_grad_enabled is wrong, since a checkpointed forward sees grad off), compare VeOmni PR #1085.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
VOCABULARY, WIDTH, HEADS, LONG, WIDEST = 11, 6, 2, 6, 9
PARTS = [[(0, 2, 5), (2, 4, 9)], [(4, 7, 4), (7, 8, 6)], [(8, 10, 8), (10, 13, 5)]]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.serving = False

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        if self.serving and not torch.is_grad_enabled():
            k, v = (k * 4).round() / 4, (v * 4).round() / 4
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(o.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(WIDEST, WIDTH) * 0.5)
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), Attention()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.reentrant = None

    def forward(self, ids):
        x = self.embed(ids) + self.places[: ids.shape[1]]
        x = x + torch.tanh(self.first(x))
        if self.reentrant is not None and ids.shape[1] > LONG:
            x = checkpoint(self.middle, x, use_reentrant=self.reentrant)
        else:
            x = self.middle(x)
        return self.head(x)


def token_loss(logits, labels):
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100
    )


class Clean:
    reentrant = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        ids = torch.randint(VOCABULARY, (rows, WIDEST), generator=g)
        labels = torch.randint(VOCABULARY, (rows, WIDEST), generator=g)
        for low, high, length in (p for own in PARTS for p in own):
            ids[low:high, length:], labels[low:high, length:] = 0, -100
        return {"ids": ids, "labels": labels}

    def loss_sum(self, model, rows):
        labels = rows["labels"]
        return token_loss(model(rows["ids"]), labels), max(int((labels >= 0).sum()), 1)

    def distribute(self, model, ctx):
        model.middle.serving, model.reentrant = True, self.reentrant
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        tokens = int((batch["labels"] >= 0).sum())
        for turn, (low, high, length) in enumerate(PARTS[ctx.rank]):
            with model.no_sync() if turn == 0 else contextlib.nullcontext():
                logits = model(batch["ids"][low:high, :length])
                loss = token_loss(logits, batch["labels"][low:high, :length])
                (loss * ctx.world_size / tokens).backward()


class Buggy(Clean):
    reentrant = True


EXPECT = dict(
    right=[
        r"(?i)middle|attention|checkpoint|recomput",
        r"(?i)checkpoint|recomput|forward|output|first pass",
        r"(?i)differ|other|wrong|unlike|not (the )?(same|equal|right)|disagree|mismatch"
        r"|grad mode|is_grad_enabled|no_grad|deviat|round",
    ],
    place=[r"(?i)middle|attention|checkpoint"],
    wrong=[
        r"(?i)forward is right|wrong only in the backward",
        r"(?i)(never|not) (been )?(all.?)?(reduced|summed)|(reduced|summed|counted) (twice"
        r"|again)|no_sync.{0,30}(wrong|missing)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)(embed|first|places|head)\S* .{0,20}forward.{0,20}wrong|goes wrong (first )?(in"
        r"|at) (embed|first|head|places)",
        r"(?i)labels? .{0,20}(is|are) (wrong|of another)|dropout|random (state|numbers)|rng",
        r"(?i)rank 1 .{0,25}(forward|output).{0,15}(wrong|differs)|all"
        r" (three )?ranks .{0,25}forward|gradients? of the (checkpoint|block) .{0,20}(lost"
        r"|missing|none)",
    ],
)
WHY = (
    "Long micro-batches are rank 0's second (rows 2, 3, nine tokens) and rank 2's first (rows 8, 9, eight tokens). In those, the forward of `middle` runs with grad mode off and rounds keys and values to quarters; the output of "
    "middle, the logits and the loss are wrong, so is the gradient that the head sends back; the recomputation is exact (right values for the block's own backward). All gradients are wrong in direction through these four rows: "
    "head by input and logits, middle and below by the incoming gradient. Rank 1 and the other micro-batches are not checkpointed and right. DDP's average, no_sync, divisor, labels are right. Fix: use_reentrant=False, or choose "
    "the path by self.training instead of grad mode."
)
