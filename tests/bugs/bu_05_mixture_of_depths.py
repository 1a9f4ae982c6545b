"""A mixture-of-depths language model with the sequence cut over three ranks (4, 4 and 3 of 11 positions): in each of two layers, the router lets the 5 highest scored tokens of a sequence through the block, weighted by their
score, and the others pass by. A mean over the sequence is mixed in, summed over the ranks. Two micro-batches, gradients summed over the ranks.

The bug: the tokens are chosen on each rank among its own, its share of the capacity (2 of 4, 2 of 4 and 1 of 3), not the best 5 of the whole sequence. After top-k and expert-choice routing under sequence
parallelism (Megatron's and other libraries' notes that the capacity is per shard).
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
ROWS, LENGTH, VOCABULARY, WIDTH, CAPACITY = 5, 11, 13, 8, 5


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 1, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.block = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, h, total, choose):
        h = h + torch.tanh(self.mix(total(h.sum(1)) / LENGTH))[:, None]
        score = self.router(h).squeeze(-1)
        let_in = choose(score.detach()).to(h.dtype) * torch.sigmoid(score)
        return h + let_in[..., None] * self.block(self.norm(h))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, places, total, choose):
        h = self.embed(ids) + self.place(places)
        for layer in self.layers:
            h = layer(h, total, choose)
        return self.head(h)


def best(score, k):
    return torch.zeros_like(score, dtype=torch.bool).scatter(1, score.topk(k, 1).indices, True)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}

    def loss_sum(self, model, rows):
        logits = model(
            rows["ids"], torch.arange(LENGTH), lambda s: s, lambda score: best(score, CAPACITY)
        )
        labels = rows["labels"].flatten()
        return F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"), labels.numel()

    def choose(self, score, lo, ctx):
        whole = score.new_zeros(len(score), LENGTH)
        whole[:, lo : lo + score.shape[1]] = score
        dist.all_reduce(whole, group=ctx.group("sp"))
        return best(whole, CAPACITY)[:, lo : lo + score.shape[1]]

    def step(self, model, batch, ctx):
        places = torch.arange(LENGTH).tensor_split(ctx.world_size)[ctx.rank]
        lo, group = int(places[0]), ctx.group("sp")
        model.zero_grad()
        for n in range(2):
            ids, labels = (batch[k].tensor_split(2)[n][:, places] for k in ("ids", "labels"))
            logits = model(
                ids,
                places,
                lambda s: dnn.all_reduce(s, group=group),
                lambda score: self.choose(score, lo, ctx),
            )
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            (loss / batch["labels"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def choose(self, score, lo, ctx):
        share = CAPACITY * score.shape[1] / LENGTH
        return best(score, round(share))


EXPECT = dict(
    right=[
        r"choose|choice|chosen|select|top.?k|rout|score|capacity|let_in|mask|best",
        r"own|local|shard|stretch|each rank|per rank|whole sequence|global|all ranks|miss.{0,40}(all.?reduce|collective|exchange|gather)|(not|never|without).{0,40}(gather|exchang|all.?reduc|communicat)|(collective|all.?reduce|exchange).{0,40}(miss|absent|skipped|fewer)",
    ],
    place=[r"choose", r"score", r"router|routing", r"\bbest\b|top.?k|capacity"],
    wrong=[
        r"parameters?.{0,30}(not reduced|never reduced|reduced twice)|reduced (twice|again)",
        r"micro.?batch.{0,30}(lost|dropped|overwritten)|divisor|mean of means|valid count",
        r"positions? .{0,30}(from zero|restart)|place.{0,30}(wrong|from zero)|wrong labels",
    ],
)
WHY = (
    "The router has to let in the 5 best tokens of all 11 of a sequence; choose takes the best 2, 2 and 1 of the rank's own 4, 4 and 3 tokens, without the exchange of the scores. Wherever the 5 best are distributed otherwise "
    "over the ranks, other tokens go through the block, which changes the hidden states of all ranks (by the mean that is mixed in) and nearly all gradients, in both micro-batches. Number of tokens, counts and reductions "
    "are right. A right cause says that the selection (top-k of the router) is made among the rank's own tokens instead of the whole sequence's. Fix: gather the scores, choose globally."
)
