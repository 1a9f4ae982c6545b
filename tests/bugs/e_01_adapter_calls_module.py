"""A domain-adversarial adapter under DDP: classifier and domain critic on one convolutional trunk.
After intel/e2eAIOK PR 198 ("DDP grads not sync bug fix in domain adapter"; also icefall issue 226): the
parts are taken out of the wrapper and called directly, so DDP's forward never runs.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, CHANNELS, LENGTH, CLASSES, REVERSAL, WEIGHT = 13, 3, 10, 5, 0.7, 0.4


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(CHANNELS, 7, 3, padding=1)
        self.norm = nn.GroupNorm(1, 7)
        self.conv2 = nn.Conv1d(7, 9, 3, stride=2)

    def forward(self, x):
        return F.gelu(self.conv2(F.gelu(self.norm(self.conv1(x))))).mean(-1)


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = Trunk()
        self.classifier = nn.Linear(9, CLASSES)
        self.critic = nn.Sequential(nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 1))

    @staticmethod
    def reverse(f):
        """The same value; the gradient times -REVERSAL."""
        return (1 + REVERSAL) * f.detach() - REVERSAL * f

    def forward(self, x):
        f = self.trunk(x)
        return self.classifier(f), self.critic(self.reverse(f))[:, 0]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Adapter()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, CHANNELS, LENGTH, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
            "target": torch.rand(ROWS, generator=g) < 0.4,
        }

    @staticmethod
    def loss_of(logits, domain, rows):
        """Source rows have labels; all rows have a domain."""
        fit = F.cross_entropy(logits, rows["y"], reduction="none") * ~rows["target"]
        tell = F.binary_cross_entropy_with_logits(
            domain, rows["target"].to(domain.dtype), reduction="none"
        )
        return (fit + WEIGHT * tell).sum()

    def loss_sum(self, model, rows):
        return self.loss_of(*model(rows["x"]), rows), len(rows["x"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def outputs(self, model, x):
        return model(x)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = torch.tensor(len(mine["x"]))
        dist.all_reduce(count)
        loss = self.loss_of(*self.outputs(model, mine["x"]), mine)
        (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    def outputs(self, model, x):
        net = model.module
        features = net.trunk(x)
        return net.classifier(features), net.critic(net.reverse(features))[:, 0]


EXPECT = dict(
    right=[
        r"(not|never|n't|no|missing|without|skip\w*|lacks?|un|bypass\w*|only)[ -]?.{0,40}(reduc|summed|synchroni|averag"
        r"|combin|communicat|exchang|added)|own (rows|gradient|part|share)|local (rows|gradient|part|share)|rank.?local"
        r"|differ\w* (between|across|from rank|on)|partial|each rank (has|keeps|holds)"
    ],
    place=[
        r"\b(all|every|each|no) (the )?(param|rank|tensor|grad)",
        r"\branks?\b",
        r"\bDDP\b",
        r"\bdp\b",
        r"trunk",
    ],
    wrong=[
        r"(reduced|counted|summed) (twice|again|two times)",
        r"forward (pass )?(is|was) wrong",
        r"mean of (the )?(rank |ranks' )?means",
        r"only (the )?(classifier|critic|trunk)\b.{0,20} (is|are) wrong",
    ],
)
WHY = (
    "The step calls model.module's parts, so DDP.forward does not arm the reducer and no gradient is all-reduced: every "
    "rank keeps the gradient of its own rows, times world_size (3) because the loss was multiplied for an average. All "
    "parameters, all ranks."
)
