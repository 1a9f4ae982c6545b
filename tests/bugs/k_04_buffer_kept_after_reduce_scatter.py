"""ZeRO-2 by hand: after each micro-batch the flat gradients are reduce-scattered and added to the rank's shard. After FAULTS C12-08
(InfiniTrain PR 213, accumulation under ZeRO-2) and DeepSpeed's ZeRO-2 with accumulation (the averaged gradients are freed after
each micro-batch): they are freed at the end only.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH, MICRO_BATCHES = 19, 6, 14, 7, 3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = (
            nn.Embedding(VOCAB, WIDTH),
            nn.GRU(WIDTH, WIDTH + 2, batch_first=True),
        )
        self.norm, self.head = nn.LayerNorm(WIDTH + 2), nn.Linear(WIDTH + 2, VOCAB)

    def forward(self, tokens):
        return self.head(self.norm(self.rnn(self.embed(tokens))[0]))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        padding = torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].masked_fill(padding, -100)}

    def loss_sum(self, model, rows):
        logits, labels = model(rows["tokens"]), rows["labels"]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()

    def free(self, model, is_boundary):
        model.zero_grad()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = (mine["labels"] != -100).sum()
        dist.all_reduce(count)
        params = list(model.parameters())
        size = sum(p.numel() for p in params)
        padded = -(-size // ctx.world_size) * ctx.world_size
        shard = torch.zeros(padded // ctx.world_size, dtype=ctx.dtype)
        for i in range(MICRO_BATCHES):
            rows = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            (self.loss_sum(model, rows)[0] / count).backward()
            flat = F.pad(torch.cat([p.grad.flatten() for p in params]), (0, padded - size))
            own = torch.empty_like(shard)
            dist.reduce_scatter_tensor(own, flat)
            shard += own
            self.free(model, i == MICRO_BATCHES - 1)
        flat = torch.empty(padded, dtype=ctx.dtype)
        dist.all_gather_into_tensor(flat, shard)
        for p, grad in zip(params, flat[:size].split([p.numel() for p in params])):
            p.grad = grad.view_as(p).clone()


class Buggy(Clean):
    def free(self, model, is_boundary):
        if is_boundary:
            model.zero_grad()


EXPECT = dict(
    right=[
        r"micro-?batch|accumulat|rows",
        r"again|twice|\b[23]\b|two|three|repeated|more than once|several times|not (freed|zeroed|cleared)|stale|left over|kept|earlier",
    ],
    place=[
        r"(all|every|each) param|all (of )?(the )?(gradients|weights)|embed|rnn|head",
        r"micro-?batch",
        r"(all|every|each) ranks?",
        r"rows",
    ],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"(all|every) (micro-?batch(es)?|rows?) (is|are|count|counts|counted) (twice|3 times|three times|2 times)",
        r"micro-?batch(es)? .{0,12}(is|are|was|were) (lost|missing|dropped)",
        r"padding|normali[sz]ed by (its|their) own",
    ],
)
WHY = (
    "p.grad still holds the earlier micro-batches when it is reduce-scattered again: of the three micro-batches of each rank the "
    "first counts 3 times, the second 2 times, the third once. All parameters are wrong on all ranks, equally on all of them; the "
    "forward is right."
)
