"""Encoder in three pipeline stages (one attention block per rank, embedding on the first, token head on the last), GPipe with three micro-batches of rows of different length. A stage sends its hidden state and the mask of the valid
tokens to the next one; all that goes over the wire has the dtype of the hidden state. The gradients go back the same way, and at the end the gradients of all stages are summed so that every rank has all of them.

The bug: the receiving stage gives the mask to scaled_dot_product_attention as it came, in floating point. A boolean mask says which keys take part; a floating one is added to the scores, here 1 for valid tokens and 0 for padding. As
in huggingface/diffusers issue 14342 (context-parallel path consumes a bool attn_mask as an additive 0/1 bias).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
TOKENS, VOCABULARY, WIDTH, HEADS, CLASSES = 6, 9, 8, 2, 4
LENGTHS = [6, 3, 5, 2, 4, 6, 1]
MICRO = [(0, 3), (3, 5), (5, 7)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.joint, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x, mask):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.joint(x).chunk(3, -1))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = self.norm(x + self.out(o.transpose(1, 2).flatten(2)))
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)


def valid(rows):
    return torch.arange(TOKENS, device=rows["ids"].device)[None] < rows["length"][:, None]


def sum_of_losses(logits, rows):
    there = valid(rows)
    return F.cross_entropy(logits[there], rows["labels"][there], reduction="sum")


class Clean:
    as_it_came = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        shape = (len(LENGTHS), TOKENS)
        return {
            "ids": torch.randint(VOCABULARY, shape, generator=g),
            "labels": torch.randint(CLASSES, shape, generator=g),
            "length": torch.tensor(LENGTHS),
        }

    def loss_sum(self, model, rows):
        x, mask = model.embed(rows["ids"]), valid(rows)
        for block in model.blocks:
            x = block(x, mask)
        return sum_of_losses(model.head(x), rows), int(rows["length"].sum())

    def step(self, model, batch, ctx):
        stage, last, kept = ctx.rank, ctx.world_size - 1, []
        total = int(batch["length"].sum())
        for low, high in MICRO:
            rows = {k: v[low:high] for k, v in batch.items()}
            if stage == 0:
                into, mask = None, valid(rows)
                x = model.embed(rows["ids"])
            else:
                into = model.embed.weight.new_empty(high - low, TOKENS, WIDTH)
                wire = model.embed.weight.new_empty(high - low, TOKENS)
                dist.recv(into, stage - 1)
                dist.recv(wire, stage - 1)
                x = into.requires_grad_()
                mask = wire if self.as_it_came else wire.bool()
            out = model.blocks[stage](x, mask)
            if stage < last:
                dist.send(out.detach().contiguous(), stage + 1)
                dist.send(mask.to(out.dtype), stage + 1)
            else:
                out = sum_of_losses(model.head(out), rows) / total
            kept.append((into, out))
        for into, out in kept:
            if stage < last:
                grad = torch.empty_like(out, memory_format=torch.contiguous_format)
                dist.recv(grad, stage + 1)
                out.backward(grad)
            else:
                out.backward()
            if stage > 0:
                dist.send(into.grad.contiguous(), stage - 1)
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)


class Buggy(Clean):
    as_it_came = True


EXPECT = dict(
    right=[
        r"(?i)forward|output|mask|attend|padd|attention|scores",
        r"(?i)rank 1|stage 1|second stage|later stages|ranks 1|blocks?\W{0,2}1|mask|padd",
        r"(?i)blocks?|attention|stage|joint|mask",
    ],
    place=[r"(?i)blocks?\W{0,2}[12]|attention|mask|rank [12]|stage [12]"],
    wrong=[
        r"(?i)forward is right|only (in )?the backward is wrong",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten|swapped)",
        r"(?i)(wrong|starts|begins|differs) .{0,20}(on|at|in) (rank|stage) 0\b",
        r"(?i)other micro.?batch|gradient.{0,20}(sent|received).{0,20}(wrong|swapped)",
        r"(?i)blocks\.0.{0,20}(forward|output).{0,15}wrong|embed.{0,20}(forward|output).{0,15}wrong",
    ],
)
WHY = (
    "Stage 0 uses the boolean mask and is right in its forward. Stages 1 and 2 use the mask as it came over the wire, a floating tensor of ones and zeros: scaled_dot_product_attention adds it to the scores, so padding takes part with "
    "its full weight (valid keys only get e times more). The forward goes wrong first in blocks.1 (its attention, before blocks.1.out) on rank 1, and again in blocks.2 on rank 2, in all three micro-batches, for the rows that have "
    "padding: 1, 2 (micro-batch 0), 3, 4 (micro-batch 1), 6 (micro-batch 2). Rows 0 and 5 have no padding: a constant added to all scores changes nothing, they are right. Gradients of all parameters are wrong (blocks.0 and embed "
    "through the gradients handed back, also by padding tokens), the same on all ranks. Hidden states on the wire, gradients sent back, order of the micro-batches, labels, divisor 27 and the sum over the stages are right. Fix: "
    "wire.bool() on the receiving stage."
)
