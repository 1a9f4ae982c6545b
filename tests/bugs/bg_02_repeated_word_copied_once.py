"""Summarising with a pointer-generator on two data ranks times two ranks that cut the vocabulary (7 and 6 of 13 words), two micro-batches of uneven size each. Every rank makes the probabilities of its words, generated and copied from the
source by attention, and the probability of the target word is summed over the vocabulary ranks. The divisor is the number of target words of all rows. Gradients are summed over the data ranks by hand.

The bug: the attention is written into the words with scatter, not added. A word that stands several times in the source keeps the attention of one place. After abisee/pointer-generator issues 22 (Why not tf.scatter_nd_add ...) and 72
(not sure about implementation of copy scatter function).
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
WORDS, WIDTH, SOURCE, TARGET = 13, 6, 8, 4
CUTS = [(0, 7), (7, 13)]
LENGTHS = [4, 2, 3, 4, 1, 4, 3]
PARTS = [[(0, 1), (1, 4)], [(4, 6), (6, 7)]]


class Enter(torch.autograd.Function):
    """Into the part that is cut: gradients of all ranks are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    """Out of the part that is cut: values of all ranks are summed."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Mixture(nn.Module):
    """The probability of the target words, generated or copied."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.group, self.adds = 0, WORDS, None, True

    def forward(self, scores, attention, gate, source, target):
        group = self.group
        if group is not None:
            attention, gate = Enter.apply(attention, group), Enter.apply(gate, group)
        top = scores.detach().amax(-1, keepdim=True)
        if group is not None:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        power = (scores - top).exp()
        total = power.sum(-1, keepdim=True)
        if group is not None:
            total = Enter.apply(Leave.apply(total, group), group)
        width = self.last - self.first
        inside = (source >= self.first) & (source < self.last)
        place = torch.where(inside, source - self.first, width)
        place = place[:, None].expand_as(attention)
        copied = attention.new_zeros(*attention.shape[:2], width + 1)
        if self.adds:
            copied = copied.scatter_add(2, place, attention)
        else:
            copied = copied.scatter(2, place, attention)
        words = gate * power / total + (1 - gate) * copied[..., :-1]
        mine = (target >= self.first) & (target < self.last)
        at = (target - self.first).clamp(0, width - 1)
        found = words.gather(2, at[..., None]).squeeze(2) * mine
        return found if group is None else Leave.apply(found, group)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(SOURCE, WIDTH) * 0.5)
        self.encode, self.decode = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(2 * WIDTH, 1)
        self.words = nn.Linear(2 * WIDTH, WORDS)
        self.mixture = Mixture()

    def forward(self, source, before, target):
        memory = torch.tanh(self.encode(self.embed(source) + self.places))
        state = torch.tanh(self.decode(self.embed(before)))
        attention = (self.query(state) @ memory.transpose(1, 2)).softmax(-1)
        both = torch.cat([state, attention @ memory], -1)
        gate = torch.sigmoid(self.gate(both))
        if self.mixture.group is not None:
            both = Enter.apply(both, self.mixture.group)
        return self.mixture(self.words(both), attention, gate, source, target)


def summary_loss(model, rows):
    found = model(rows["source"], rows["before"], rows["target"])
    real = torch.arange(TARGET) < rows["length"][:, None]
    return -(found + 1e-6).log()[real].sum()


class Clean:
    adds = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(LENGTHS)
        kinds = torch.randint(WORDS, (rows, 4), generator=g)
        source = kinds.gather(1, torch.randint(4, (rows, SOURCE), generator=g))
        target = source.gather(1, torch.randint(SOURCE, (rows, TARGET), generator=g))
        start = torch.zeros(rows, 1, dtype=torch.int64)
        return {
            "source": source,
            "before": torch.cat([start, target[:, :-1]], 1),
            "target": target,
            "length": torch.tensor(LENGTHS),
        }

    def loss_sum(self, model, rows):
        return summary_loss(model, rows), int(rows["length"].sum())

    def distribute(self, model, ctx):
        first, last = CUTS[ctx.coords["tp"]]
        for name in ("weight", "bias"):
            whole = getattr(model.words, name)
            setattr(model.words, name, nn.Parameter(whole.detach()[first:last].clone()))
        model.mixture.first, model.mixture.last = first, last
        model.mixture.group, model.mixture.adds = ctx.group("tp"), self.adds
        return model

    def step(self, model, batch, ctx):
        count = int(batch["length"].sum())
        for low, high in PARTS[ctx.coords["dp"]]:
            rows = {k: v[low:high] for k, v in batch.items()}
            (summary_loss(model, rows) / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    adds = False


EXPECT = dict(
    right=[
        r"(?i)mixture|attention|copied|copy|scatter|query",
        r"(?i)forward|scatter|overwr|not added|probabilit|value",
    ],
    place=[r"(?i)mixture|scatter|cop(y|ied)"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|never summed",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the (first|last) micro.?batch",
        r"(?i)only (on )?rank [0-3]\b|rank [0-3] alone|wrong group",
        r"(?i)labels? .{0,20}(is|are) (wrong|of)|softmax over (its|the) own|recomput",
        r"(?i)(?<!not )(encode|decode|embed|query|gate|words)(\.\w+)? (goes|is) (first )?wrong in the forward",
    ],
)
WHY = (
    "In Mixture.forward the attention of the source places is written into the slots of their words with scatter, so of a word that stands at several places only one place's attention (the last) counts; the right is their sum (scatter_add). "
    "Every rank, every micro-batch, every row with a repeated source word that is a target is wrong, in the forward at `mixture`: the copied probability is too small. scatter's backward moreover gives every place the whole gradient. The parts "
    "before (embed, encode, decode, query, gate, words) compute right values; the gradients of all parameters are wrong because the probability is. The softmax over the vocabulary ranks, the sums over tp and dp and the divisor are right. Fix: "
    "scatter_add (index_add)."
)
