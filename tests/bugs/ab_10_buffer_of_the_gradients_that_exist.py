"""Multilingual sentence classification: a shared trunk and, in each of two layers, one bottleneck adapter per language (four languages), data parallel by hand on four ranks. The loader gives every rank sentences of two languages. After the
backward the gradients are copied into one flat buffer, summed over the ranks, and copied back.

The bug: the buffer is made of the gradients that exist. A rank has none for adapters whose languages it did not see, and skips them. All adapters are of one size and each rank saw two languages, so all buffers are equally long and the sum runs;
but the places of the adapters belong to other languages on other ranks. An adapter that a rank did not use keeps no gradient there. After hand-written reductions with `[p for p in params if p.grad is not None]` in multi-task and adapter
training.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
LANGUAGES, PER_RANK, LENGTH, WORDS, WIDTH, NECK, CLASSES = 4, 3, 5, 21, 8, 3, 3
ROWS = 4 * PER_RANK


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, NECK), nn.Linear(NECK, WIDTH)

    def forward(self, x):
        return self.up(torch.tanh(self.down(x)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.adapters = nn.ModuleList(Adapter() for _ in range(LANGUAGES))

    def forward(self, x, language):
        y = self.norm(x)
        context = y.mean(1, keepdim=True).expand_as(y)
        x = x + torch.tanh(self.mix(torch.cat([y, context], -1)))
        out = x.clone()
        for number in language.unique().tolist():
            own = language == number
            out[own] = x[own] + self.adapters[number](x[own])
        return out


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens, language):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, language)
        return self.head(self.norm(x).mean(1))


class Clean:
    all_places = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        first = torch.arange(ROWS) // PER_RANK
        second = torch.arange(ROWS) % PER_RANK == 1
        return {
            "tokens": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
            "language": (first + second) % LANGUAGES,
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["tokens"], rows["language"])
        return F.cross_entropy(logits, rows["label"], reduction="sum"), len(rows["label"])

    def step(self, model, batch, ctx):
        model.zero_grad(set_to_none=True)
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        (self.loss_sum(model, mine)[0] / ROWS).backward()
        params = list(model.parameters())
        if self.all_places:
            for p in params:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        params = [p for p in params if p.grad is not None]
        flat = torch.cat([p.grad.flatten() for p in params])
        dist.all_reduce(flat, group=ctx.group("dp"))
        for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.grad.copy_(part.view_as(p))


class Buggy(Clean):
    all_places = False


EXPECT = dict(
    right=[
        r"(?i)adapter",
        r"(?i)(other|another|different|unlike|wrong|mixed|swapped) .{0,30}(param|gradient|tensor|place|position|adapter|language|layout|order)|misalign|belongs? to|layout|buffer|no gradient|None|order of|not the same|without a gradient|skip|unused",
    ],
    place=[r"(?i)adapter", r"(?i)reduc|sum|buffer|collective|flat|gradient"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)\b(embed|mix|head|norm)(\.(weight|bias))? (is|are) wrong",
        r"(?i)wrong divisor|divi(ded|des) by (its|their) own|factor of (1/)?[24]\b",
        r"(?i)(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)rows? .{0,20}(never read|read twice|dropped)|backward of .{0,30}(is|goes) wrong",
    ],
)
WHY = (
    "Ranks 0, 1, 2, 3 see the languages {0, 1}, {1, 2}, {2, 3}, {0, 3} and have gradients for these adapters only; the flat buffer holds, per layer, the two that exist, in the order of the parameters. The all-reduce adds in the first place "
    "adapter 0 (ranks 0 and 3), 1 (rank 1) and 2 (rank 2), in the second 1 (rank 0), 2 (rank 1) and 3 (ranks 2 and 3). Each rank copies these sums back to its own two adapters; the adapters of the two other languages have no gradient (None) "
    "on that rank. So on no rank is an adapter's gradient right, and the ranks differ. The local gradients before the reduction are right on all ranks. embed, norm and mix of both layers, the last norm and head lie at the same places in all "
    "buffers, since each rank has two adapters of one size per layer, and are right. Forward, loss, divisor 12 and rows are right. Fix: a place for every parameter, with zeros where a rank has no gradient."
)
