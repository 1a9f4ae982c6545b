"""A text model under DDP on three ranks (3, 2 and 1 micro-batches, no_sync before the last): one attention with shared weights is used twice, first causally for the next-token loss, then in both directions for the class of the text. The
second pass is a block under torch.utils.checkpoint (non-reentrant) that switches the attention's `causal` off at its beginning and on again at its end.

The bug: the recomputation stops early, as soon as the last tensor that the backward needs is there, so the block's last line never runs in the backward and `causal` stays off. The next micro-batch's first pass looks ahead. Early stop
is the default since pytorch/pytorch PR 96866 (Make early stop the default for checkpoint and expose a way to disable).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
TOKENS, VOCABULARY, WIDTH, CLASSES = 6, 9, 8, 3
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 7), (7, 10)], [(10, 12)]]
ROWS = 12


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.joint, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.causal = True

    def forward(self, x):
        q, k, v = self.joint(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(o.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.5)
        self.mixer, self.norm = Mixer(), nn.LayerNorm(WIDTH)
        self.wide, self.words = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.topic = nn.Linear(WIDTH, CLASSES)
        self.careful, self.saving = True, False

    def survey(self, x):
        self.mixer.causal = False
        if self.careful:
            try:
                x = x + self.mixer(x)
                return x + F.silu(self.wide(self.norm(x)))
            finally:
                self.mixer.causal = True
        x = x + self.mixer(x)
        x = x + F.silu(self.wide(self.norm(x)))
        self.mixer.causal = True
        return x

    def forward(self, ids):
        x = self.embed(ids) + self.places
        x = x + self.mixer(x)
        words = self.words(x)
        if self.saving:
            x = checkpoint(self.survey, x, use_reentrant=False)
        else:
            x = self.survey(x)
        return words, self.topic(x.mean(1))


def text_loss(model, rows):
    words, topic = model(rows["ids"])
    ahead = rows["ids"][:, 1:].flatten()
    loss = F.cross_entropy(words[:, :-1].flatten(0, 1), ahead, reduction="sum")
    return loss + F.cross_entropy(topic, rows["topic"], reduction="sum")


class Clean:
    careful = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
            "topic": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return text_loss(model, rows), len(rows["topic"])

    def distribute(self, model, ctx):
        model.careful, model.saving = self.careful, True
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        model.module.mixer.causal = True
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (text_loss(model, rows) * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    careful = False


EXPECT = dict(
    right=[
        r"(?i)mixer|attention|causal|mask|state|flag|attribute|switch",
        r"(?i)micro.?batch(es)? (1|2|[^.]{0,20}(after|but|except|later|second|further))|"
        r"after the first|"
        r"later micro|second micro|from micro.?batch|not the first|left (over|behind|on|"
        r"off)|previous|stays",
        r"(?i)forward|recomput|checkpoint|state|flag|attribute|causal",
    ],
    place=[r"(?i)mixer|attention|causal|survey"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|"
        r"no_sync.{0,40}(wrong|missing)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)recomput\w* (gives|has|uses|draws|makes) (an)?other (value|result|mask|activation)s?",
        r"(?i)first micro.?batch.{0,25}(goes|is) wrong|all micro.?batch.{0,20}wrong|"
        r"rank 2.{0,25}(goes|is) wrong",
        r"(?i)labels? .{0,20}(is|are) (wrong|of)|dropout",
    ],
)
WHY = (
    "On every rank the first micro-batch is right, forward and backward. In its backward the block `survey` is recomputed with causal = False (right), but the recomputation is ended by early stop at the last saved tensor, before the "
    "line that sets mixer.causal = True. So the first, causal pass of the next micro-batch runs without the causal mask: rank 0 micro-batches 1 and 2 (rows 2-4), rank 1 micro-batch 1 (rows 7-9); rank 2 has one micro-batch (rows 10, "
    "11) and is right. The forward goes wrong at `mixer` in its first call; the block itself recomputes what it computed. Wrong are the gradients of all parameters (words reads the wrong features; topic sees them through the second "
    "pass). DDP, no_sync, divisor 12, labels are right. Fix: set the switch back in a finally clause (the stop is an exception), pass causal as an argument, or set_checkpoint_early_stop(False)."
)
