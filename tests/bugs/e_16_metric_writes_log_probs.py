"""A temporal convolutional tagger; rank 0 logs the mean entropy of its predictions. After facebookresearch/fairchem PR 645
("change _compute_metrics not to modify callers version"): the metric works in place on .data, which autograd does not notice.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"tagger": {"axes": {"dp": 4}}}}
ROWS, LENGTH, SENSORS, WIDTH, TAGS = 13, 9, 4, 7, 5


class Causal(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.pad, self.norm = 2 * dilation, nn.LayerNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, 2 * WIDTH, 3, dilation=dilation)

    def forward(self, x):
        y = self.conv(F.pad(self.norm(x).transpose(1, 2), (self.pad, 0)))
        return x + F.glu(y, dim=1).transpose(1, 2)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(SENSORS, WIDTH)
        self.blocks = nn.ModuleList(Causal(d) for d in (1, 2))
        self.tags = nn.Linear(WIDTH, TAGS)

    def forward(self, x):
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        return self.tags(x).log_softmax(-1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Tagger()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "x": torch.randn(ROWS, LENGTH, SENSORS, generator=g),
            "tag": torch.randint(TAGS, (ROWS, LENGTH), generator=g),
            "mask": torch.arange(LENGTH) < lengths,
        }

    @staticmethod
    def loss_of(logp, rows):
        return -(logp.gather(-1, rows["tag"][..., None])[..., 0] * rows["mask"]).sum()

    def loss_sum(self, model, rows):
        return self.loss_of(model(rows["x"]), rows), rows["mask"].sum()

    def entropy(self, logp, mask):
        logp = logp.detach()
        return -((logp.exp() * logp).sum(-1) * mask).sum() / mask.sum()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = mine["mask"].sum()
        dist.all_reduce(count)
        logp = model(mine["x"])
        loss = self.loss_of(logp, mine) / count
        if ctx.rank == 0:
            self.logged = {"loss": loss.item(), "entropy": self.entropy(logp, mine["mask"]).item()}
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def entropy(self, logp, mask):
        logs = logp.data.clone()
        p = logp.data.exp_()
        return -((p * logs).sum(-1) * mask).sum() / mask.sum()


EXPECT = dict(
    right=[
        r"rank\W{0,3}0|first rank|rows? \W{0,2}0|rows? .{0,12}\b0\b|one rank",
        r"backward|in.?place|overwrit|modif|softmax|logit|log.?prob|metric|entropy|\.data|damag|corrupt|forward (is|was|agrees)|loss (is|was) "
        r"(right|correct)|direction|not (a )?(multiple|proportional)|gradient (is|of|at)|tags|other than",
    ],
    place=[r"rank\W{0,3}0|first rank", r"tags|softmax|log.?prob", r"rows"],
    wrong=[
        r"ranks? \W?[123]\W{0,2}('s)? .{0,30}(is|are|has|have) (a )?wrong",
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"(reduced|counted|divided) (twice|again)",
        r"mean of (the )?means",
        r"forward (pass )?(is|was) wrong",
        r"rows? (is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "On rank 0 the metric exponentiates the log-probabilities in place through .data after the loss was computed; log_softmax's backward "
    "uses that saved output, so the gradient at the logits of rank 0's rows is wrong (softmax replaced by exp(softmax)). After the sum "
    "every parameter is wrong, alike on all ranks; the forward, and rows of other ranks, are right."
)
