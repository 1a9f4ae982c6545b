"""transformers' Audio Spectrogram Transformer, trained with the supervised contrastive loss on two
views of each recording. Data parallel over three ranks (3, 2 and 2 of 7 recordings), one
micro-batch (the loss compares all with all). Each rank embeds both of its views, first all of
the first kind, then all of the second, and gathers the embeddings of the others with gradient;
its own anchors are its part of the loss.

Bug: the labels are gathered and then repeated for the two views. The gathered embeddings lie rank
by rank, with both views of a rank next to each other. After SupContrast under DDP.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import ASTConfig, ASTModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
CLIPS, TIME, MEL, WARMTH = 7, 9, 6, 0.3


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        config = ASTConfig(
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=11,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.4,
            patch_size=3,
            frequency_stride=3,
            time_stride=2,
            max_length=TIME,
            num_mel_bins=MEL,
            attn_implementation="eager",
        )
        self.body = ASTModel(config)
        self.project = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, x):
        return F.normalize(self.project(self.body(input_values=x).pooler_output), dim=-1)


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lo, total, group):
        ctx.lo, ctx.own, ctx.group = lo, x.shape[0], group
        full = x.new_zeros(total, *x.shape[1:])
        full[lo : lo + x.shape[0]] = x
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g[ctx.lo : ctx.lo + ctx.own], None, None, None


def contrast(anchors, anchor_labels, first, every, labels):
    """Sum over the anchors, which are rows `first`, `first` + 1, ... of `every`."""
    scores = anchors @ every.t() / WARMTH
    self_mask = torch.zeros_like(scores, dtype=torch.bool)
    place = torch.arange(anchors.shape[0])
    self_mask[place, first + place] = True
    log_p = scores - scores.masked_fill(self_mask, -torch.inf).logsumexp(1, keepdim=True)
    positive = ((anchor_labels[:, None] == labels[None]) & ~self_mask).to(scores.dtype)
    return -((positive * log_p).sum(1) / positive.sum(1).clamp(min=1)).sum()


def both(views):
    return torch.cat([views[:, 0], views[:, 1]])


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 61)
        return Encoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 611)
        views = torch.randn(CLIPS, 1, TIME, MEL, generator=g)
        views = views + 0.5 * torch.randn(CLIPS, 2, TIME, MEL, generator=g)
        return {"views": views, "label": torch.tensor([0, 1, 0, 2, 1, 0, 2])}

    def loss_sum(self, model, rows):
        z, labels = model(both(rows["views"])), rows["label"].repeat(2)
        return contrast(z, labels, 0, z, labels), z.shape[0]

    def gathered(self, x, rows, group, views):
        total = CLIPS * views
        return GatherRows.apply(x, int(rows[0]) * views, total, group)

    def all_labels(self, label, rows, group):
        return self.gathered(label.repeat(2), rows, group, 2)

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        rows = torch.arange(CLIPS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        views, label = batch["views"][rows], batch["label"][rows]
        z = model(both(views))
        every = self.gathered(z, rows, group, 2)
        labels = self.all_labels(label, rows, group)
        loss = contrast(z, label.repeat(2), 2 * int(rows[0]), every, labels)
        (loss / (2 * CLIPS)).backward()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def all_labels(self, label, rows, group):
        return self.gathered(label, rows, group, 1).repeat(2)


EXPECT = dict(
    right=[
        r"label|positive|class",
        r"order|repeat|align|match|row|arrang|layout|permut|tile|interleav|mismatch|pair",
        r"gather|view|rank|embedding|feature|every",
    ],
    place=[r"all_labels", r"\.repeat\(2\)", r"\blabels\b", r"\bcontrast\b", r"\bpositive\b"],
    wrong=[
        r"gather.{0,40}(without grad|no grad|detach)",
        r"self.?mask.{0,40}(wrong|missing|offset)",
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"temperature",
        r"uneven.{0,40}(rows|recordings)",
    ],
)
WHY = """Each rank's embeddings are [its first views, its second views], so the gathered ones lie
[r0 first, r0 second, r1 first, r1 second, ...]. Buggy.all_labels gathers the labels of all ranks
and then repeats the whole: [r0, r1, r2, r0, r1, r2]. The anchors' own labels are right, but many
columns carry the label of another recording, so that positives are wrong. A right cause says that
labels and gathered embeddings are in different orders. Fix: gather label.repeat(2)."""
