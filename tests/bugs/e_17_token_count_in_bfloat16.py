"""A GRU language model on two levels of ranks; loss and token count travel in one small vector. After FAULTS C20-05 and C20-03
(values kept in the low precision of their neighbours): the vector has the dtype of the loss under autocast, bfloat16.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"node": 3, "local": 2}}}}
LENGTH, VOCAB, WIDTH = 17, 21, 7
LENGTHS = [17, 12, 9, 16, 14, 11, 17, 13, 16, 10, 15, 12, 17, 11, 17, 13, 14, 9, 16]  # 259 tokens


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        return self.out(self.norm(self.rnn(self.embed(ids))[0]))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Reader()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (len(LENGTHS), LENGTH + 1), generator=g)
        valid = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(~valid, -100)}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"]).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum")
        return loss, (rows["labels"] != -100).sum()

    def statistics(self, loss, count):
        return torch.stack([loss.detach().double(), count.double()])

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, count = self.loss_sum(model, mine)
        totals = self.statistics(loss, count)
        for axis in ("local", "node"):
            dist.all_reduce(totals, group=ctx.group(axis))
        self.logged = (totals[0] / totals[1]).item()
        (loss / totals[1].to(loss.dtype)).backward()
        for param in model.parameters():
            for axis in ("local", "node"):
                dist.all_reduce(param.grad, group=ctx.group(axis))


class Buggy(Clean):
    def statistics(self, loss, count):
        return torch.stack([loss.detach(), count]).to(torch.bfloat16)


EXPECT = dict(
    right=[
        r"count|tokens?|divis|denominator|normali[sz]|259|260|258|scale|factor|0\.99[56]",
        r"bfloat16|bf16|precision|round|dtype|half|16.?bit|low(er)?.precision|cast|259/260|259/258",
    ],
    place=[
        r"count|tokens?|divis|denominator|normali",
        r"\b(all|every)\b",
        r"bfloat16|bf16|dtype|cast|round",
    ],
    wrong=[
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"(reduced|counted|divided) (twice|again)",
        r"mean of (the )?means",
        r"forward (pass )?(is|was) wrong",
        r"rows? (is|are|was|were) (lost|missing|dropped)",
        r"ranks (disagree|differ|hold different)",
    ],
)
WHY = (
    "The global token count 259 is summed in bfloat16, which has no 259 and gives 260 (or 258): every parameter on every rank is multiplied "
    "by 259/260 = 0.996, a pure scale."
)
