"""Hand-written pipeline of three stages with GPipe order and micro-batches of 3, 3 and 1 rows: an embedding with a GRU (tokens first, as torch's GRU has it), a block that mixes over tokens (rows first), a head (rows first). The first
stage sends its hidden states tokens first; the second turns them before its leaf.

The bug: on the way back the second stage sends the gradient of its leaf as it lies, rows first, and the first stage receives into a buffer tokens first of the same number of elements. The numbers land at other tokens and rows,
silently, since a point-to-point message has no shape. As reviewed in soumith/cudnn.torch PR #169 (batchFirst: the gradInput's sizes are changed, the data not turned); for stage gradients compare pytorch issue #139404.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, TOKENS, VOCABULARY, WIDTH, MICRO = 7, 4, 9, 5, 3


class Front(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH)

    def forward(self, ids):
        return self.gru(self.embed(ids.t()))[0]


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.over_tokens = nn.Linear(TOKENS, TOKENS)
        self.over_width = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.over_tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + F.silu(self.over_width(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.front, self.mixer, self.head = Front(), Mixer(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        return self.head(self.mixer(self.front(ids).transpose(0, 1)))


def token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Clean:
    turn_back = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
        }

    def loss_sum(self, model, rows):
        return token_loss(model(rows["ids"]), rows["labels"]), rows["labels"].numel()

    def step(self, model, batch, ctx):
        group = ctx.group("pp")
        parts = torch.arange(ROWS).split(MICRO)
        kind = model.head.weight.dtype
        leaves, results = [], []
        for part in parts:
            if ctx.rank == 0:
                results.append(model.front(batch["ids"][part]))
            elif ctx.rank == 1:
                received = torch.empty(TOKENS, len(part), WIDTH, dtype=kind)
                dist.recv(received, group=group, group_src=0)
                leaves.append(received.transpose(0, 1).contiguous().requires_grad_())
                results.append(model.mixer(leaves[-1]))
            else:
                received = torch.empty(len(part), TOKENS, WIDTH, dtype=kind)
                dist.recv(received, group=group, group_src=1)
                leaves.append(received.requires_grad_())
                loss = token_loss(model.head(leaves[-1]), batch["labels"][part])
                results.append(loss / (ROWS * TOKENS))
            if ctx.rank < 2:
                dist.send(results[-1].detach().contiguous(), group=group, group_dst=ctx.rank + 1)
        for i in range(len(parts)):
            gradient = None
            if ctx.rank < 2:
                gradient = torch.empty_like(results[i], memory_format=torch.contiguous_format)
                dist.recv(gradient, group=group, group_src=ctx.rank + 1)
            results[i].backward(gradient)
            if ctx.rank > 0:
                back = leaves[i].grad
                if ctx.rank == 1 and self.turn_back:
                    back = back.transpose(0, 1)
                dist.send(back.contiguous(), group=group, group_dst=ctx.rank - 1)
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    turn_back = False


EXPECT = dict(
    right=[
        r"(?i)gradient|backward|cotangent",
        r"(?i)front|gru|rank 0|stage 0|first stage|embed",
        r"(?i)transport|sent|send|receiv|arriv|hand|transpos|layout|permut|order|turned|swapp"
        r"|other (rows|tokens|positions)|"
        r"gradient (of|at|for|with respect to) (the )?(output|its output|results?|front)"
        r"|comes? in|incoming|between (the )?(stages|ranks)|other (row|token)|misplac",
    ],
    place=[r"(?i)front|gru|stage 0|rank 0|between (stage|rank)|mixer"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong|differs)|goes wrong in the forward",
        r"(?i)(mixer|head|over_tokens|over_width|norm)\S* (is|are) wrong",
        r"(?i)(never|not) (been )?(all.?)?(reduced|summed)|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of",
        r"(?i)(gradient|micro.?batch).{0,30}(of|from) (another|the wrong"
        r"|a different) micro.?batch|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
        r"(?i)own backward of (the )?gru|labels? .{0,20}(is|are) wrong"
        r"|all (three )?micro.?batches (are|is) wrong",
    ],
)
WHY = (
    "Rank 1 sends the gradient of its input as (rows, tokens, width), rank 0 reads it as (tokens, rows, width): for micro-batches 0 and 1 (rows 0-2 and 3-5; 3 rows, 4 tokens) the gradient at row b, token t is placed at the place "
    "with the same flat number: flat number b*4+t is read as token (b*4+t)//3, row (b*4+t)%3. Micro-batch 2 (row 6) has one row and is right. Only front (embed, gru) has wrong gradients, on rank 0 by computation, on all ranks "
    "after the sum over pp. All forwards, the loss, mixer and head, the gradient from rank 2 to rank 1, divisor 28 are right; the backward of the GRU itself is right for what it was given. Fix: transpose the gradient before "
    "sending (or make the leaf in the layout received)."
)
