"""A gated convolution tagger for sound (WaveNet-like, eleven dilated layers), in a pipeline over
pp (3).

The layers stand in a ModuleDict by their number; each stage keeps its own part and drops the
rest. GPipe with three micro-batches and point-to-point messages by hand.

Bug: the stages are cut from the sorted names, and sorted as text "10" stands between "1" and "2":
the eleventh layer runs third. After stage splitters that sort module names so that all ranks
agree on the order.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
C, LAYERS, TAGS = 5, 11, 4


class GatedLayer(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.dilation = dilation
        self.conv = nn.Conv1d(C, 2 * C, 2, dilation=dilation)
        self.out = nn.Conv1d(C, C, 1)

    def forward(self, x):
        a, b = self.conv(F.pad(x, (self.dilation, 0))).chunk(2, 1)
        return x + self.out(torch.tanh(a) * torch.sigmoid(b))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Conv1d(2, C, 1)
        self.layers = nn.ModuleDict({str(i): GatedLayer(1 + i % 3) for i in range(LAYERS)})
        self.head = nn.Conv1d(C, TAGS, 1)

    def forward(self, x):
        if self.enter is not None:
            x = self.enter(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Tagger()

    def batch(self):
        g = torch.Generator().manual_seed(600 + self.seed)
        return {
            "sound": torch.randn(7, 2, 9, generator=g),
            "tag": torch.randint(0, TAGS, (7, 9), generator=g),
        }

    def tag_loss(self, logits, rows):
        return F.cross_entropy(logits, rows["tag"], reduction="sum"), rows["tag"].numel()

    def loss_sum(self, model, rows):
        return self.tag_loss(model(rows["sound"]), rows)

    def layer_names(self, model):
        return list(model.layers)

    def distribute(self, model, ctx):
        stage, stages = ctx.coords["pp"], ctx.axes["pp"]
        names = self.layer_names(model)
        cuts = [round(i * len(names) / stages) for i in range(stages + 1)]
        model.layers = nn.ModuleDict(
            {n: model.layers[n] for n in names[cuts[stage] : cuts[stage + 1]]}
        )
        if stage > 0:
            model.enter = None
        if stage < stages - 1:
            model.head = None
        return model

    def step(self, model, batch, ctx):
        ranks = dist.get_process_group_ranks(ctx.group("pp"))
        stage, last = ctx.coords["pp"], ctx.axes["pp"] - 1
        count = batch["tag"].numel()
        parts = [
            dict(zip(batch, p, strict=True))
            for p in zip(*(v.tensor_split(3) for v in batch.values()), strict=True)
        ]
        kept = []
        for part in parts:
            if stage == 0:
                x = part["sound"]
            else:
                x = part["sound"].new_empty(part["sound"].shape[0], C, part["sound"].shape[-1])
                dist.recv(x, ranks[stage - 1])
                x.requires_grad_()
            y = model(x)
            if stage == last:
                y = self.tag_loss(y, part)[0] / count
            else:
                dist.send(y.detach().contiguous(), ranks[stage + 1])
            kept.append((x, y))
        for x, y in kept:
            if stage == last:
                y.backward()
            else:
                g = torch.empty_like(y)
                dist.recv(g, ranks[stage + 1])
                y.backward(g)
            if stage > 0:
                dist.send(x.grad.contiguous(), ranks[stage - 1])


class Buggy(Clean):
    def layer_names(self, model):
        return sorted(model.layers)


EXPECT = dict(
    right=[
        r"sort|order|lexicograph|alphabet|as text|permut|sequence of (the )?layers",
        r"layer|stage|module",
    ],
    place=[r"layer_names", r"sorted", r"layers\.(10|2)\b", r"distribute", r"layers"],
    wrong=[
        r"micro-?batch\w* .*(mixed|order)",
        r"(received|sent) gradient .*(wrong|stale)",
        r"dilation .*(wrong|local)",
        r"count .*(local|micro)",
    ],
)
WHY = """layer_names sorts the keys of the ModuleDict as text, so the order is 0, 1, 10, 2, 3,
..., 9: the stages hold and apply the layers in that order, layer 10 third and not last. The
pipeline computes another function, so practically all gradients are wrong (also enter and head),
though each stage's messages are right. A right cause says that the layers run in another
(lexicographic) order than in the model. The fix is list(model.layers), or to sort by int."""
