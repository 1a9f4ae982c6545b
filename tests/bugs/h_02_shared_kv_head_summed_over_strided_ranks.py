"""Grouped-query attention with fewer key heads (2) than tensor-parallel ranks (4): each key head lies on two ranks, whose gradients for
it must be summed. After Megatron-LM's and vLLM's `num_query_groups < tp` (reports on replicated KV heads) and FAULTS C05-10, C16: the
groups of the copies are built with a stride.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 4}}}}
ROWS, LENGTH, WORDS, SIZE, Q_HEADS, KV_HEADS, HIDDEN, MICRO_BATCHES = 7, 6, 19, 3, 8, 2, 20, 2
WIDTH = 10


class IntoRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class OutOfRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, Q_HEADS * SIZE, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KV_HEADS * SIZE, bias=False) for _ in range(2))
        self.o = nn.Linear(Q_HEADS * SIZE, WIDTH, bias=False)
        self.up, self.down = (
            nn.Linear(WIDTH, HIDDEN, bias=False),
            nn.Linear(HIDDEN, WIDTH, bias=False),
        )

    def forward(self, x, enter, leave):
        y = enter(self.norm1(x))
        q, k, v = (f(y).unflatten(-1, (-1, SIZE)).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(2 * q, k, v, is_causal=True)
        x = x + leave(self.o(out.transpose(1, 2).flatten(2)))
        return x + leave(self.down(F.silu(self.up(enter(self.norm2(x))))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words, enter=lambda x: x, leave=lambda x: x):
        x = self.words(words) + self.places.weight
        for layer in self.layers:
            x = layer(x, enter, leave)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        words = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g)
        labels = words[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100)
        return {"words": words[:, :-1].contiguous(), "labels": labels}

    @staticmethod
    def word_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.word_loss(model(rows["words"]), rows["labels"]), (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        tp, rank = ctx.axes["tp"], ctx.coords["tp"]
        for layer in model.layers:
            for linear, dim in ((layer.q, 0), (layer.o, 1), (layer.up, 0), (layer.down, 1)):
                linear.weight = nn.Parameter(linear.weight.detach().chunk(tp, dim)[rank].clone())
            for linear in (layer.k, layer.v):  # the head that this rank's query heads look at
                head = linear.weight.detach().chunk(KV_HEADS)[rank * KV_HEADS // tp]
                linear.weight = nn.Parameter(head.clone())
        for ranks in self.holders(tp):
            group = dist.new_group(ranks)
            if rank in ranks:
                self.kv_group = group
        return model

    def holders(self, tp):
        copies = tp // KV_HEADS
        return [list(range(head * copies, (head + 1) * copies)) for head in range(KV_HEADS)]

    def step(self, model, batch, ctx):
        count = (batch["labels"] != -100).sum()
        for i in range(MICRO_BATCHES):
            rows = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in batch.items()}
            logits = model(rows["words"], IntoRegion.apply, OutOfRegion.apply)
            (self.word_loss(logits, rows["labels"]) / count).backward()
        for layer in model.layers:
            for linear in (layer.k, layer.v):
                dist.all_reduce(linear.weight.grad, group=self.kv_group)


class Buggy(Clean):
    def holders(self, tp):
        return [list(range(head, tp, KV_HEADS)) for head in range(KV_HEADS)]


EXPECT = dict(
    right=[
        r"\b(k|v)\.weight|layers\.[01]\.(k|v)\b|key|kv",
        r"group|other (head|shard|slice|rows|part|half)|wrong (head|shard|rank)|another|different (head|shard|slice|part)|"
        r"rank \W?[0-3].{0,60}rank \W?[0-3]|ranks \W?\d.{0,12}\d|mix|pair|"
        r"not (the same|its) (head|shard|slice)|partial|own part|own share|lacks?|missing",
    ],
    place=[
        r"layers\.[01]\.(k|v)",
        r"\b(k|v)\.weight",
        r"(all|every|each|four) ranks?|ranks? \W?[0-3]",
    ],
    wrong=[
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"\b(q|o|up|down|norm1|norm2|head|words|places)(\.weight)? (is|are|has|have) (a )?wrong",
        r"mean of (the )?(rank |ranks' )?means",
        r"averag\w+ (instead|where)",
    ],
)
WHY = (
    "Key head 0 lies on ranks 0 and 1, head 1 on ranks 2 and 3, but the sums run over ranks {0, 2} and {1, 3}: each rank adds its "
    "partial gradient of one head to a partial gradient of the other "
    "head. k.weight and v.weight of both layers are wrong on all ranks, all other gradients are right."
)
