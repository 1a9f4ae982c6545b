"""A chunked cross entropy over the supervised tokens of a rank, each chunk recomputed in the backward, parameters under FSDP2 on replicas
and shards. After torchtune's and verl's chunked output losses and Liger's chunk loops, and FAULTS C12-13 (a final partial window is
dropped): the loop runs over the whole chunks.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

TOPOLOGY = {"pools": {"train": {"axes": {"replicate": 2, "shard": 2}}}}
ROWS, LENGTH, WIDTH, VOCABULARY, CHUNK = 11, 9, 8, 21, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, labels, output_loss):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        kept = labels != -100
        return output_loss(self.head, self.norm(x)[kept], labels[kept])


def chunk_loss(head, hidden, labels):
    return F.cross_entropy(head(hidden), labels, reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        prompts = torch.randint(0, 6, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) < prompts, -100),
        }

    def loss_sum(self, model, rows):
        return model(rows["ids"], rows["labels"], chunk_loss), (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def starts(self, tokens):
        return range(0, tokens, CHUNK)

    def output_loss(self, head, hidden, labels):
        parts = [slice(i, i + CHUNK) for i in self.starts(len(labels))]
        return sum(
            checkpoint(chunk_loss, head, hidden[p], labels[p], use_reentrant=False) for p in parts
        )

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss = model(mine["ids"], mine["labels"], self.output_loss)
        (loss / (batch["labels"] != -100).sum()).backward()


class Buggy(Clean):
    def starts(self, tokens):
        return [CHUNK * i for i in range(tokens // CHUNK)]


EXPECT = dict(
    right=[
        r"rows?|tokens?|positions?|contribut|loss",
        r"missing|lacks?|lost|lose|drop|absent|not (counted|included|contribut)|without|zero|left out|\b0\b|omit|skip|weight|coefficient|"
        r"wrong",
    ],
    place=[
        r"rows? \W?\d|tokens?|rows",
        r"ranks? \W?[0-3]",
        r"(all|every|each) (parameters?|ranks?)",
        r"loss|head",
    ],
    wrong=[
        r"never (been )?(all.?)?reduced|missing (all.?)?reduc|is not reduced",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"(embed|blocks\.\d|norm)\S* .{0,30}first wrong",
        r"mean of (the )?(rank |ranks' )?means|divided by (its|their) own",
        r"forward of (the )?(model|blocks\.\d|embed)\S* (is|was|are|were) wrong",
    ],
)
WHY = (
    "The loop over chunks of six supervised tokens stops before the last, shorter one, so on each rank whose number of supervised "
    "tokens is not a multiple of six the last ones (at the end of its last row) do not enter the loss, while the divisor counts them. "
    "The gradients of all parameters lack those tokens; the rest is right."
)
