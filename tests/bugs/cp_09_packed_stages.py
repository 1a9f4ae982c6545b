"""A language model over packed documents (a leaky sum per channel that begins anew with every
document) in two pipeline stages over pp (2), packs over dp (2: four and three of seven), one pack a
micro-batch, all forwards before all backwards. The last stage uses the embedding of the first one
as its head; the two gradients of the shared weight are summed over pp at the end.

The leaky sum is an autograd function; it keeps the boundaries of the pack (cu_seqlens) for its
backward.

Bug: the stage writes the boundaries of each micro-batch into one buffer that was made once, and the
function keeps a reference to it: at the time of the backwards it holds the boundaries of the last
pack. After static metadata buffers (made for CUDA graphs) under schedules with more than one micro-
batch in flight.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 2}}}}
PACKS, T, WORDS, D, DOCS = 7, 10, 11, 6, 4


def goes_on(bounds, t):
    """1 where a token continues the document of the token before it, 0 where one begins."""
    begins = (torch.arange(t) == bounds[..., :, None]).any(-2)
    return (~begins).to(torch.get_default_dtype())


def leaky_sum_plainly(x, leak, bounds):
    on = goes_on(bounds, x.shape[1]).to(x.dtype)
    y, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        y = leak * on[:, t, None] * y + x[:, t]
        out.append(y)
    return torch.stack(out, 1)


class LeakySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, leak, bounds):
        y = leaky_sum_plainly(x, leak, bounds)
        ctx.save_for_backward(leak, y)
        ctx.bounds = bounds
        return y

    @staticmethod
    def backward(ctx, g):
        leak, y = ctx.saved_tensors
        on = goes_on(ctx.bounds, g.shape[1]).to(g.dtype)[..., None]
        whole, carried = torch.empty_like(g), torch.zeros_like(g[:, 0])
        for t in reversed(range(g.shape[1])):
            whole[:, t] = g[:, t] + carried
            carried = leak * on[:, t] * whole[:, t]
        before = F.pad(y, (0, 0, 1, 0))[:, :-1]
        return whole, (whole * on * before).sum((0, 1)), None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.enter = nn.Linear(D, 2 * D)
        self.leak = nn.Parameter(torch.randn(D))
        self.out = nn.Linear(D, D)
        self.summed = leaky_sum_plainly

    def forward(self, x, bounds):
        v, gate = self.enter(self.norm(x)).chunk(2, -1)
        return x + self.out(self.summed(v, self.leak.sigmoid(), bounds) * F.silu(gate))


class PackedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, D)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(D)

    def begin(self, ids, bounds):
        return self.blocks[0](self.embed(ids), bounds)

    def end(self, x, bounds):
        return F.linear(self.norm(self.blocks[1](x, bounds)), self.embed.weight)

    def forward(self, ids, bounds):
        return self.end(self.begin(ids, bounds), bounds)


class Boundaries:
    """The boundaries of a micro-batch as the stage gives them to its block."""

    def of(self, rows):
        return rows["bounds"].clone()


class StageBoundaries(Boundaries):
    def __init__(self):
        self.buffer = torch.full((1, DOCS), T)

    def of(self, rows):
        return self.buffer.copy_(rows["bounds"])


class Clean:
    boundaries = Boundaries

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 91)
        return PackedModel()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 910)
        text = torch.randint(WORDS, (PACKS, T + 1), generator=g)
        inner = torch.rand(PACKS, T - 1, generator=g).argsort(1)[:, : DOCS - 1] + 1
        bounds = torch.cat([torch.zeros(PACKS, 1, dtype=torch.long), inner.sort(1).values], 1)
        ends = (torch.arange(1, T + 1) == bounds[:, :, None]).any(1)
        return {"ids": text[:, :-1], "label": text[:, 1:].masked_fill(ends, -100), "bounds": bounds}

    def score(self, logits, rows):
        return F.cross_entropy(logits.flatten(0, 1), rows["label"].flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], rows["bounds"])
        return self.score(logits, rows), (rows["label"] != -100).sum()

    def distribute(self, model, ctx):
        own = ctx.coords["pp"]
        model.blocks[own].summed = LeakySum.apply
        model.blocks[1 - own] = nn.Identity()
        if own == 0:
            model.norm = nn.Identity()
        return model

    def step(self, model, batch, ctx):
        pp, group = ctx.coords["pp"], ctx.group("pp")
        own = torch.arange(PACKS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        turns = [{k: v[part] for k, v in batch.items()} for part in own.split(1)]
        boundaries, flight = self.boundaries(), []
        for rows in turns:
            bounds = boundaries.of(rows)
            if pp == 0:
                x = model.begin(rows["ids"], bounds)
                dist.send(x.detach(), group=group, group_dst=1)
                flight.append((None, x))
            else:
                x = model.embed.weight.new_empty(1, T, D)
                dist.recv(x, group=group, group_src=0)
                x.requires_grad_()
                flight.append((x, self.score(model.end(x, bounds), rows)))
        for heard, result in flight:
            if pp == 0:
                g = torch.empty_like(result)
                dist.recv(g, group=group, group_src=1)
                result.backward(g)
            else:
                (result / (batch["label"] != -100).sum()).backward()
                dist.send(heard.grad, group=group, group_dst=0)
        dist.all_reduce(model.embed.weight.grad, group=group)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    boundaries = StageBoundaries


EXPECT = dict(
    right=[
        r"bound|cu_?seqlens|document|buffer|pack|metadata|saved|kept|ctx\.",
        r"last (pack|micro|turn|one)|overwrit|reus|alias|one buffer|in.?place|later|"
        r"(other|another|wrong) (pack|micro|turn)|shared|same (buffer|tensor|storage|memory)|"
        r"changed|mutat|reference to",
    ],
    place=[
        r"StageBoundaries",
        r"\bboundaries\b",
        r"ctx\.bounds",
        r"LeakySum",
        r"buffer\.copy_",
        r"\bbounds\b",
    ],
    wrong=[
        r"(embed|tied|shared weight).{0,40}(not|never|twice).{0,20}(summ|reduc)",
        r"label.{0,30}(shift|-100|ignore)",
        r"(stage|pipeline).{0,40}(order of|wrong micro.?batch).{0,20}(gradient|sent)",
        r"forward.{0,30}(wrong|differ)",
        r"leak.{0,30}gradient.{0,20}sign",
    ],
)
WHY = """StageBoundaries.of copies each pack's document boundaries into one buffer and returns that
buffer; LeakySum keeps it on ctx. All forwards run before the backwards, so every backward but
that of the last micro-batch cuts the documents where the last pack has its boundaries: gradients
cross documents or stop early, in both stages. The forward and the losses are right, pipeline and
tied sum too. The fix: a tensor per micro-batch (clone), or save_for_backward."""
