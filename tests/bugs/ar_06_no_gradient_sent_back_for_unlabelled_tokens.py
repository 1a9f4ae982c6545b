"""Pipeline by hand on three ranks (embedding and block 0, block 1, block 2 and head), three micro-batches of two, one and two padded sequences, forwards first and backwards in the same order after them. Only the rows of real tokens
travel: the sender packs hidden[mask], the receiver puts them back in a zero tensor. At the end the gradients of all stages are summed over the pipeline, so that every rank has all of them.

The bug: on the way back the stages pack by the labels' mask, "since tokens with the label -100 have no loss and so no gradient". But later blocks attend to the tokens of the prompt; their hidden states get a gradient through keys and
values, and it is not sent. As the discussion in EleutherAI/bergson PR 322 says, the loss of the answer flows back through the masked positions by way of the attention.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
TOKENS, VOCABULARY, WIDTH, STAGES = 7, 9, 6, 3
LENGTHS, PROMPTS = [7, 4, 6, 5, 3], [2, 1, 3, 2, 1]
MICRO = [(0, 2), (2, 3), (3, 5)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.squeeze(1))
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.5)
        self.blocks = nn.ModuleList(Block() for _ in range(STAGES))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def stage(self, number, x):
        if number == 0:
            x = self.embed(x) + self.places
        x = self.blocks[number](x)
        return self.head(x) if number == STAGES - 1 else x

    def forward(self, x):
        for number in range(STAGES):
            x = self.stage(number, x)
        return x


def token_loss(logits, labels):
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def send_rows(x, mask, to):
    dist.send(x[mask].contiguous(), to)


def receive_rows(like, mask, source):
    rows = like.new_empty(int(mask.sum()), WIDTH)
    dist.recv(rows, source)
    x = like.new_zeros(*mask.shape, WIDTH)
    x[mask] = rows
    return x


class Clean:
    labelled_only = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows, place = len(LENGTHS), torch.arange(TOKENS)[None]
        real = place < torch.tensor(LENGTHS)[:, None]
        labels = torch.randint(VOCABULARY, (rows, TOKENS), generator=g)
        labels[~real | (place < torch.tensor(PROMPTS)[:, None])] = -100
        ids = torch.randint(VOCABULARY, (rows, TOKENS), generator=g)
        return {"ids": ids * real, "real": real, "labels": labels}

    def loss_sum(self, model, rows):
        valid = int((rows["labels"] != -100).sum())
        return token_loss(model(rows["ids"]), rows["labels"]), max(valid, 1)

    def step(self, model, batch, ctx):
        rank, like = ctx.rank, model.places
        valid = int((batch["labels"] != -100).sum())
        kept = []
        for low, high in MICRO:
            x, real = batch["ids"][low:high], batch["real"][low:high]
            if rank > 0:
                x = receive_rows(like, real, rank - 1).requires_grad_()
            out = model.stage(rank, x)
            if rank < STAGES - 1:
                send_rows(out.detach(), real, rank + 1)
            kept.append((x, out))
        for (low, high), (x, out) in zip(MICRO, kept):
            labels = batch["labels"][low:high]
            back = labels != -100 if self.labelled_only else batch["real"][low:high]
            if rank == STAGES - 1:
                (token_loss(out, labels) / valid).backward()
            else:
                out.backward(receive_rows(like, back, rank + 1))
            if rank > 0:
                send_rows(x.grad, back, rank - 1)
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=ctx.group("pp"))


class Buggy(Clean):
    labelled_only = True


EXPECT = dict(
    right=[
        r"(?i)gradient|backward|sent back|hand(s|ed|ing)? (back|over)|way back",
        r"(?i)stages?|ranks?|boundary|pipeline|block|hand.?over|between|transport|sent|receiv",
        r"(?i)tokens?|positions?|rows?|prompt|label|mask|part of|missing|lost|zero|drop|not sent"
        r"|incomplete|differ",
    ],
    place=[r"(?i)stage|rank|boundary|pipeline|blocks?|hand.?over|sent back"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(head|blocks[.\[]2\]?)[a-z.]*(weight|bias)? (is|are) wrong",
        r"(?i)(never|not) (been )?all.?reduced|(reduced|summed) (twice|again)|counted (twice"
        r"|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)other micro.?batch|micro.?batch(es)? .{0,20}(lost|dropped|overwritten|swapped|mixed)",
        r"(?i)recomput",
        r"(?i)only the (first|last) micro.?batch",
    ],
)
WHY = (
    "The forward is right on all stages, and so is the last stage's own gradient (block 2, head). On the hand-over of gradients from rank 2 to rank 1 and from rank 1 to rank 0 only the rows with a label are sent; the receiver "
    "has zeros for the prompt tokens (PROMPTS: 2, 1, 3, 2, 1 first tokens of the five sequences). Block 2 attends to these tokens, so their hidden states have a gradient through keys and values, which is lost; block 1 then "
    "works with the rest and loses again. Wrong: all parameters of blocks 0 and 1, embed, places, in direction, in all micro-batches, the same on all ranks after the sum. Padding tokens come last under the causal mask and "
    "have no gradient, so that packing by `real` is right both ways. Divisor, order of micro-batches, reduction are right. Fix: pack gradients by the mask of the forward."
)
