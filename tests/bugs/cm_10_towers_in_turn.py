"""A sound/caption contrastive model (two small towers, learned logit scale and symmetric InfoNCE
over all 7 pairs), rows over dp (3). GradCache-like: features of all rows without graph, gathered;
loss and gradient on these features; then the own rows again in micro-batches of two with these
gradients. The gradient of the scale is complete on every rank and is not summed.

Bug: to keep one side's graph at a time the loss is run back for each tower in turn, with the
other's features held fixed. The features' gradients are right; the scale is in both turns and gets
its gradient twice. After chunked contrastive losses that "detach the other tower".
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, SOUND, WORDS, LENGTH, WIDTH = 7, 6, 11, 5, 4


class Sound(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(SOUND, 5, 3)
        self.out = nn.Linear(5, WIDTH)

    def forward(self, x):
        return F.normalize(self.out(F.gelu(self.conv(x)).mean(-1)), dim=-1)


class Caption(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 5)
        self.rnn = nn.GRU(5, 5, batch_first=True)
        self.out = nn.Linear(5, WIDTH, bias=False)

    def forward(self, x):
        return F.normalize(self.out(self.rnn(self.words(x))[0][:, -1]), dim=-1)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.sound, self.caption = Sound(), Caption()
        self.logit_scale = nn.Parameter(torch.tensor(1.3))

    def contrast(self, a, b):
        logits = self.logit_scale.exp() * a @ b.t()
        target = torch.arange(a.shape[0])
        both = [F.cross_entropy(x, target, reduction="sum") for x in (logits, logits.t())]
        return (both[0] + both[1]) / 2


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 101)
        return Pair()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1010)
        return {
            "sound": torch.randn(ROWS, SOUND, 8, generator=g),
            "caption": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows):
        loss = model.contrast(model.sound(rows["sound"]), model.caption(rows["caption"]))
        return loss, rows["sound"].shape[0]

    def gathered(self, tower, x, own, group):
        with torch.no_grad():
            part = torch.cat([tower(x[rows]) for rows in own.split(2)])
        full = part.new_zeros(ROWS, WIDTH)
        full[own] = part
        dist.all_reduce(full, group=group)
        return full

    def feature_gradients(self, model, a, b):
        a, b = a.requires_grad_(), b.requires_grad_()
        (model.contrast(a, b) / ROWS).backward()
        return a.grad, b.grad

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        towers = {"sound": model.sound, "caption": model.caption}
        features = [self.gathered(t, batch[name], own, group) for name, t in towers.items()]
        grads = self.feature_gradients(model, *features)
        for (name, tower), grad in zip(towers.items(), grads, strict=True):
            for rows in own.split(2):
                tower(batch[name][rows]).backward(grad[rows])
            for p in tower.parameters():
                dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def feature_gradients(self, model, a, b):
        grads = []
        for turn in range(2):
            sides = [a.detach(), b.detach()]
            sides[turn].requires_grad_()
            (model.contrast(*sides) / ROWS).backward()
            grads.append(sides[turn].grad)
        return grads


EXPECT = dict(
    right=[
        r"logit_scale|temperature|scale",
        r"twice|two times|double|factor (of )?2|2x|\b2(\.0+)?\b|two (backward|turn|pass)|"
        r"both turns|once (per|for each) (tower|turn)",
        r"accumul|backward|turn|pass|tower|count|feature_gradients|contrast",
    ],
    place=[r"feature_gradients", r"logit_scale", r"\bcontrast\b"],
    wrong=[
        r"(missing|never).{0,20}all.?reduc",
        r"logit_scale.{0,20}(is|was) (all.)?(reduced|summed) over (dp|the ranks)",
        r"negatives.{0,40}(local|own|missing)",
        r"(sound|caption)\S*.{0,30}(is|are) wrong",
        r"symmetr\w+.{0,40}(divided|halved|missing)",
    ],
)
WHY = """Buggy.feature_gradients runs the whole loss back once for each tower with the other's
features detached. Each turn gives the right gradient of that tower's features, but the loss depends
on logit_scale in both turns, so its gradient is accumulated twice: exactly factor 2 on logit_scale
alone, on all ranks. The towers are right. Fix: one backward for both features, or keep the scale
out of the second turn (detach it), not a change of the reduction."""
