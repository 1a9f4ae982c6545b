"""A language model with a multi-token prediction head, whose rolled mask has fewer tokens.
After FAULTS C10-05 (Megatron-LM PR 3159).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, LENGTH, VOCABULARY, WIDTH = 8, 6, 13, 8
MTP_SCALE = 0.3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.mtp = nn.ModuleDict({"proj": nn.Linear(2 * WIDTH, WIDTH), "layer": Layer()})
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def trunk(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, ids):
        """Logits of the next token, and of the one after it."""
        x = self.trunk(ids)
        shifted = self.embed(ids.roll(-1, dims=1))
        ahead = self.mtp["layer"](self.mtp["proj"](torch.cat([x, shifted], dim=-1)))
        return self.head(x), self.head(ahead)


def token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"main": self.main, "mtp": self.mtp}

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        labels = ids.roll(-1, dims=1).masked_fill(torch.arange(LENGTH) >= lengths, -100)
        mtp_labels = labels.roll(-1, dims=1)
        mtp_labels[:, -1] = -100
        return {"ids": ids, "labels": labels, "mtp_labels": mtp_labels}

    def main(self, model, rows):
        return token_loss(model(rows["ids"])[0], rows["labels"]), (rows["labels"] != -100).sum()

    def mtp(self, model, rows):
        loss = MTP_SCALE * token_loss(model(rows["ids"])[1], rows["mtp_labels"])
        return loss, (rows["mtp_labels"] != -100).sum()

    def loss_sum(self, model, rows):
        main, count = self.main(model, rows)
        mtp, mtp_count = self.mtp(model, rows)
        return main + mtp * count / mtp_count.clamp(min=1), count

    def mine(self, batch, ctx):
        return {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        mine = self.mine(batch, ctx)
        counts = torch.stack([(mine[k] != -100).sum() for k in ("labels", "mtp_labels")])
        dist.all_reduce(counts)
        logits, ahead = model(mine["ids"])
        loss = token_loss(logits, mine["labels"]) / counts[0]
        mtp = MTP_SCALE * token_loss(ahead, mine["mtp_labels"])
        (loss + self.normalised(mtp, counts)).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)

    def normalised(self, mtp, counts):
        return mtp / counts[1]


class Buggy(Clean):
    def normalised(self, mtp, counts):
        num_tokens = counts[0]
        return mtp / num_tokens


EXPECT = dict(
    right=[r"mtp", r"count|0\.\d+|factor|scale|times"],
    place=[r"mtp"],
    wrong=[
        r"gradient.{0,30}(not|never) reduced",
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
        r"rows? .{0,30}(lost|missing|dropped)",
    ],
)

WHY = (
    "The multi-token (mtp) loss is divided by the main loss's token count, not by the fewer "
    "tokens of its own mask: that term is too small."
)
