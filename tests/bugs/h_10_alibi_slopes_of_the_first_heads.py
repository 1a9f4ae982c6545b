"""A causal model with ALiBi, its attention cut over heads with DTensor's parallelize_module, two replicas. After Megatron-DeepSpeed's ALiBi
under tensor parallelism (BLOOM) and vLLM's slopes of a rank's heads; FAULTS C19 (an index of the shard): every rank takes the slopes of
the first heads.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, LENGTH, WORDS, HEADS, SIZE = 9, 8, 21, 6, 2
WIDTH = HEADS * SIZE


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.slopes = [2.0 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)]

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for f in (self.q, self.k, self.v))
        places = torch.arange(x.shape[1])
        distance = (places - places[:, None]).to(x.dtype)
        bias = torch.tensor(self.slopes, dtype=x.dtype)[:, None, None] * distance
        bias = bias.masked_fill(distance > 0, float("-inf"))
        out = F.scaled_dot_product_attention(2 * q, k, v, attn_mask=bias)
        return self.out(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
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

    def loss_sum(self, model, rows):
        logits = model(rows["words"]).flatten(0, 1)
        return F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum"), (
            rows["labels"] != -100
        ).sum()

    def own_slopes(self, slopes, rank, ranks):
        heads = len(slopes) // ranks
        return slopes[rank * heads : (rank + 1) * heads]

    def distribute(self, model, ctx):
        plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {
            "attention.out": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        for layer in model.layers:
            parallelize_module(layer, ctx.mesh["tp"], plan)
            attention = layer.attention
            attention.slopes = self.own_slopes(attention.slopes, ctx.coords["tp"], ctx.axes["tp"])
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / (batch["labels"] != -100).sum()).backward()
        for param in model.parameters():
            grad = param.grad
            grad = grad.to_local() if hasattr(grad, "to_local") else grad
            dist.all_reduce(grad, group=ctx.group("dp"))


class Buggy(Clean):
    def own_slopes(self, slopes, rank, ranks):
        return slopes[: len(slopes) // ranks]


EXPECT = dict(
    right=[
        r"attention|layers\.0|slopes|alibi|head",
        r"forward|output|activation|input of|values? (of|at|in)|slope|bias",
    ],
    place=[
        r"layers\.0\.attention",
        r"attention",
        r"(all|every|each) ranks?|ranks? \W?[0-3]|\btp\b",
    ],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"forward (pass )?(is|was) (right|exact|correct)$",
        r"(output|forward) of (the )?(words|layers\.0\.(norm1|attention\.[qkv]\b))\S* (is|was) wrong|first wrong .{0,20}(words|norm1)",
        r"mean of (the )?(rank |ranks' )?means",
        r"no_grad|detach",
    ],
)
WHY = (
    "Heads 3 to 5, on the ranks with tp = 1, get the slopes of heads 0 to 2, so their attention falls off too quickly with distance. "
    "The forward is wrong from the attention of layers.0 on (behind the all-reduce of out on "
    "all ranks), and with it the gradients of all parameters."
)
