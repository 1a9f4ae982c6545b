"""LoRA on a frozen model, every second block under reentrant checkpointing. After the reports against transformers, peft and PyTorch ("None
of the inputs have requires_grad=True. Gradients will be None", remedied by enable_input_require_grads; FAULTS C15): the output of
the frozen embedding needs no gradient, so the first checkpoint has none to give.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WORDS, WIDTH, RANK, KINDS, MICRO_BATCHES = 13, 7, 20, 8, 2, 4, 2


class Lora(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5)
        self.b = nn.Parameter(0.4 * torch.randn(outputs, RANK))

    def forward(self, x):
        return super().forward(x) + 2 * x @ self.a.T @ self.b.T


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.norm2 = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.qkv, self.out = Lora(WIDTH, 3 * WIDTH), Lora(WIDTH, WIDTH)
        self.up, self.down = Lora(WIDTH, 12), Lora(12, WIDTH)

    def forward(self, x, there):
        q, k, v = (
            t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=there[:, None, None])
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH).requires_grad_(False)
        self.places = nn.Embedding(LENGTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, KINDS)

    def embed(self, words):
        return self.words(words) + self.places.weight

    def classify(self, x, there):
        return self.head((x * there[..., None]).sum(1) / there.sum(1, keepdim=True))

    def forward(self, words, there):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x, there)
        return self.classify(x, there)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Classifier()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "words": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
            "there": torch.arange(LENGTH) < lengths,
            "kind": torch.randint(KINDS, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["words"], rows["there"])
        return F.cross_entropy(logits, rows["kind"], reduction="sum"), len(rows["kind"])

    def embed(self, model, words):
        return model.embed(words).requires_grad_()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for i in range(MICRO_BATCHES):
            rows = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            x = self.embed(model, rows["words"])
            for n, block in enumerate(model.blocks):
                x = (
                    block(x, rows["there"])
                    if n % 2
                    else checkpoint(block, x, rows["there"], use_reentrant=True)
                )
            logits = model.classify(x, rows["there"])
            (F.cross_entropy(logits, rows["kind"], reduction="sum") / ROWS).backward()
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)


class Buggy(Clean):
    def embed(self, model, words):
        return model.embed(words)


EXPECT = dict(
    right=[
        r"blocks\.0",
        r"no gradient|none|missing|zero|never (got|receiv|reach)|without|lacks?|lost|absent|detach|not reach|no_grad|disconnect|cut off|"
        r"\b0\b",
    ],
    place=[r"blocks\.0", r"(all|every|each|three) ranks?|ranks? \W?[012]"],
    wrong=[
        r"blocks\.[123]\.\S* (is|are|has|have|gets?) (a )?(wrong|no|missing)",
        r"head\S* (is|are|has|have) (a )?wrong",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"mean of (the )?(rank |ranks' )?means",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "The reentrant checkpoint around blocks.0 gets an input without requires_grad, so its output has no graph and the adapters of "
    "blocks.0 (qkv, out, up, down: a and b) keep grad=None on all ranks. The "
    "forward and all other gradients, also those of the checkpointed blocks.2, are right."
)
