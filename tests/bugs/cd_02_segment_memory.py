"""Transformer-XL with one segment per context-parallel rank: layer by layer a segment attends to
the hidden states of the segment before it, which by definition of the model are a constant
(stop-gradient memory).

All segments are computed at once, each on its rank, and the memories are exchanged by an all-
gather. In the step the exchange is the differentiable one of torch.distributed.nn, so gradients
flow through the memory into the earlier segment. After context-parallel ports of recurrent-
memory models, where a gather "has to have gradients".
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
SEG, VOCAB, DIM, HEADS = 5, 17, 12, 3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.q = nn.Linear(DIM, DIM)
        self.kv = nn.Linear(DIM, 2 * DIM)
        self.o = nn.Linear(DIM, DIM)
        self.distance = nn.Parameter(torch.randn(HEADS, 2 * SEG) * 0.3)
        self.mlp = nn.Sequential(
            nn.LayerNorm(DIM), nn.Linear(DIM, 19), nn.GELU(), nn.Linear(19, DIM)
        )

    def forward(self, h, memory, has_memory):
        b, t, _ = h.shape
        context = self.norm(torch.cat([memory, h], dim=1))
        q = self.q(self.norm(h)).view(b, t, HEADS, -1).transpose(1, 2)
        k, v = self.kv(context).view(b, 2 * t, 2, HEADS, -1).permute(2, 0, 3, 1, 4)
        gap = torch.arange(t)[:, None] + t - torch.arange(2 * t)[None]
        score = q @ k.transpose(-1, -2) / (DIM // HEADS) ** 0.5 + self.distance[:, gap.clamp(min=0)]
        hidden = gap < 0
        if not has_memory:
            hidden = hidden | (torch.arange(2 * t)[None] < t)
        score = score.masked_fill(hidden, float("-inf"))
        h = h + self.o((score.softmax(-1) @ v).transpose(1, 2).reshape(b, t, DIM))
        return h + self.mlp(h)


class SegmentModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(11 + self.seed)
        return SegmentModel()

    def batch(self):
        g = torch.Generator().manual_seed(21 + self.seed)
        tokens = torch.randint(VOCAB, (4, 3 * SEG + 1), generator=g)
        labels = tokens[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=g) < 0.2] = -100
        return {"tokens": tokens[:, :-1].contiguous(), "labels": labels}

    def loss_sum(self, model, rows):
        total, memories = 0.0, None
        segments = zip(rows["tokens"].split(SEG, 1), rows["labels"].split(SEG, 1), strict=True)
        for tokens, labels in segments:
            h, kept = model.embed(tokens), []
            for i, layer in enumerate(model.layers):
                kept.append(h.detach())
                h = layer(h, kept[i] if memories is None else memories[i], memories is not None)
            memories = kept
            total = total + F.cross_entropy(
                model.head(h).flatten(0, 1), labels.flatten(), reduction="sum"
            )
        return total, (rows["labels"] != -100).sum()

    def exchange(self, h, group):
        """The hidden states of all segments, by rank."""
        parts = [torch.empty_like(h) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, h.detach().contiguous(), group=group)
        return parts

    def step(self, model, batch, ctx):
        group = ctx.group("cp")
        rank = dist.get_rank(group)
        tokens, labels = (batch[k].split(SEG, 1)[rank] for k in ("tokens", "labels"))
        h = model.embed(tokens)
        for layer in model.layers:
            memory = self.exchange(h, group)[rank - 1]
            h = layer(h, memory, rank > 0)
        loss = F.cross_entropy(model.head(h).flatten(0, 1), labels.flatten(), reduction="sum")
        (loss / (batch["labels"] != -100).sum()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def exchange(self, h, group):
        """The hidden states of all segments, by rank."""
        return dist_fn.all_gather(h.contiguous(), group=group)


EXPECT = {
    "right": [
        (
            r"memor(y|ies)|previous segment|earlier segment|segment before|preceding segment|"
            r"gathered hidden|exchange|all.?gather"
        ),
        (
            r"detach|stop.?grad|constant|no.?grad|gradients? (flows?|pass|leak|propagat|goes|"
            r"go|sent|reach)|differentiable|backpropagat"
        ),
    ],
    "place": [r"exchange", r"all_gather", r"\bmemory\b", r"dist_fn"],
    "wrong": [
        (
            r"gradient is (lost|cut|dropped)|no gradient (flows|reaches)|missing gradient|"
            r"lacks? (a )?(backward|gradient)"
        ),
        r"own (valid )?(token|label) count|local (token|label) count|normali[sz]",
        r"wrong segment|off by one|position|distance (bias|table)",
        r"summed twice|divided by|averaged",
    ],
}

WHY = (
    "The memory of the previous segment is a constant in this model (the single-process loop "
    "detaches it), but the context-parallel step fetches it with the differentiable all- "
    "gather, so the next segment's loss also sends a gradient back through the memory into "
    "the hidden states of the earlier rank. The forward and the loss are exactly right. Extra "
    "terms come into everything below a memory: the embedding and the first layer; the head "
    "and the parameters of the last layer are right. A right cause says that the gradient "
    "flows through the gathered memory, which has to be detached. Fix: gather h.detach()."
)
