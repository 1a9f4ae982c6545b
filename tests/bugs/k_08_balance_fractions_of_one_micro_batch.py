"""The balance loss of a mixture of experts over the global batch, with accumulation. After Qwen's global-batch balancing (a buffer
for the expert counts over accumulation steps), Megatron-LM's `global_aux_loss`, and FAULTS C10-08 and C07-07: counts are summed
over ranks, but for one micro-batch at a time.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, LENGTH, VOCAB, WIDTH, EXPERTS, LAYERS, MICRO_BATCHES, BALANCE = 14, 5, 13, 7, 4, 2, 3, 0.5


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 9) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 9, WIDTH) / 3)

    def forward(self, x):
        h = self.norm(x)
        probs = (2 * self.router(h)).softmax(-1)
        gate, chosen = probs.max(-1)
        y = F.gelu(torch.einsum("blw,blwh->blh", h, self.up[chosen]))
        y = torch.einsum("blh,blhw->blw", y, self.down[chosen])
        counts = F.one_hot(chosen, EXPERTS).sum((0, 1)).to(x.dtype)
        return x + gate[..., None] * y, torch.stack([counts, probs.sum((0, 1))])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.past = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + torch.tanh(self.past(x.cumsum(1)))
        seen = []
        for layer in self.layers:
            x, s = layer(x)
            seen.append(s)
        return self.head(x), torch.stack(seen)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "lm": lambda m, r: (self.losses(m, r)[0], r["labels"].numel()),
            "balance": (
                lambda m, r: self.statistics(self.losses(m, r)[1], r),
                lambda s, count: self.balance(s),
            ),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        skew = (torch.rand(ROWS, LENGTH + 1, generator=g) ** 2 * VOCAB).long()
        return {"tokens": skew[:, :-1], "labels": skew[:, 1:]}

    @staticmethod
    def losses(model, rows):
        logits, seen = model(rows["tokens"])
        return F.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum"
        ), seen

    @staticmethod
    def statistics(seen, rows):
        return torch.cat([seen.flatten(), seen.new_tensor([rows["labels"].numel()])])

    @staticmethod
    def balance(s):
        counts, probs = s[:-1].view(LAYERS, 2, EXPERTS).unbind(1)
        return BALANCE * EXPERTS * (counts * probs).sum() / s[-1] ** 2

    def loss_sum(self, model, rows):
        (loss, seen), n = self.losses(model, rows), rows["labels"].numel()
        return loss + n * self.balance(self.statistics(seen, rows)), n

    def fractions(self, model, micros, i):
        """(layers, experts): the share of the tokens that chose each expert, over the whole window and all ranks"""
        with torch.no_grad():
            seen = sum(self.statistics(self.losses(model, rows)[1], rows) for rows in micros)
        dist.all_reduce(seen)
        return seen[:-1].view(LAYERS, 2, EXPERTS)[:, 0] / seen[-1]

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        micros = [
            {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            for i in range(MICRO_BATCHES)
        ]
        n = batch["labels"].numel()
        for i, rows in enumerate(micros):
            fractions = self.fractions(model, micros, i)
            loss, seen = self.losses(model, rows)
            ((loss + BALANCE * EXPERTS * (fractions * seen[:, 1]).sum()) / n).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def fractions(self, model, micros, i):
        return super().fractions(model, micros[i : i + 1], 0)


EXPECT = dict(
    right=[
        r"balance|router|aux",
        r"micro-?batch|local|own|window|statistic|part of the|not (global|additive|the whole)|fraction|counts|each (rank|micro)",
    ],
    place=[r"balance", r"router", r"layers\.[01]"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"(lm|language) (term|loss) .{0,20}(wrong|scaled|missing|twice)",
        r"(head)\.\S* (is|are|was|were) (wrong|missing)",
        r"balance\S* (term|loss)? ?(is|was) (dropped|missing|lost)|detach",
    ],
)
WHY = (
    "The shares f_e of the balance loss come from one micro-batch (of both ranks) instead of the whole window of three, so the "
    "balance term's gradient is that of another function. Wrong are the routers and what lies before them (embed, past, layers.0, "
    "norms), on all ranks alike; head, the last layer's experts and the language-model term are right."
)
