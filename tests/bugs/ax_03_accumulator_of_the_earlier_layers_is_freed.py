"""Data parallelism by hand on three ranks in the form of Megatron's and ColossalAI's old overlap: the AccumulateGrad node of every parameter is found through expand_as, and a hook on the node sums the gradient over the ranks
when the last micro-batch has been accumulated. Uneven shares of 13 rows, three micro-batches a rank.

The bug: nodes with hooks live only as long as somebody holds them (a parameter refers to its AccumulateGrad weakly). They are kept in a dict under the class of the layer and the name of the parameter; a later layer of the
same class takes the place of the earlier one, whose node is freed together with its hook. The forward makes a new node without one. As in InternLM issue 323 ("If these objects are not kept, reduction hooks may not be
attached successfully") and pytorch PR 107063, which gave tensors a hook of their own.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, FEATURES, WIDTH, CLASSES = 13, 5, 7, 4
OWN = [(0, 6), (6, 9), (9, 13)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(1, 3, 3, padding=1)
        self.inner = nn.Linear(3 * FEATURES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        h = F.silu(self.stem(x[:, None])).flatten(1)
        h = self.norm(F.silu(self.inner(h)))
        return self.head(h + self.scale * F.silu(self.outer(h)))


class Overlap:
    def __init__(self, model, group, by_layer):
        self.group, self.last, self.nodes = group, False, {}
        for path, module in model.named_modules():
            for name, p in module.named_parameters(recurse=False):
                node = p.expand_as(p).grad_fn.next_functions[0][0]
                node.register_hook(self.hook(p))
                key = path if by_layer else type(module).__name__
                self.nodes[key, name] = node

    def hook(self, p):
        def run(*_):
            if self.last:
                dist.all_reduce(p.grad, group=self.group)

        return run


class Clean:
    by_layer = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FEATURES, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["label"], reduction="sum"), len(rows["x"])

    def distribute(self, model, ctx):
        self.overlap = Overlap(model, ctx.group("dp"), self.by_layer)
        return model

    def step(self, model, batch, ctx):
        parts = torch.arange(*OWN[ctx.rank]).tensor_split(3)
        for turn, part in enumerate(parts):
            self.overlap.last = turn == len(parts) - 1
            loss = F.cross_entropy(model(batch["x"][part]), batch["label"][part], reduction="sum")
            (loss / ROWS).backward()


class Buggy(Clean):
    by_layer = False


EXPECT = dict(
    right=[
        r"(?i)(never|not|without|no|lacks?|miss\w*|skip\w*|left out|lost|own|local|unreduced|"
        r"only).{0,60}"
        r"(reduc|sum|sync|exchang|hook|rank)|hook.{0,40}(lost|gone|freed|miss)",
        r"(?i)inner|outer",
    ],
    place=[r"(?i)inner|outer"],
    wrong=[
        r"(?i)forward (is|goes) wrong|wrong in the forward",
        r"(?i)(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|factor of (1/)?3\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)|too early|too late",
        r"(?i)(stem|norm|scale|head)(\.(weight|bias))? .{0,20}(is|are) (wrong|not (all.?)?reduced)",
        r"(?i)all parameters",
    ],
)
WHY = (
    "Three Linear layers share the keys ('Linear', 'weight') and ('Linear', 'bias'): inner, outer, head. Only head's nodes are still held; those of inner and outer are freed with their hooks before the first forward, which "
    "makes new AccumulateGrad nodes without hooks. So inner.weight, inner.bias, outer.weight and outer.bias are never summed over the three ranks: every rank keeps the gradient of its own rows (0-5, 6-8, 9-12, already divided "
    "by 13), different on every rank; the three add up to the right one. stem (Conv1d), norm (LayerNorm), scale (the Net itself) and head are summed and right. Forward, loss, divisor and accumulation are right. Fix: keep "
    "every node (key with the path of the layer), or register_post_accumulate_grad_hook."
)
