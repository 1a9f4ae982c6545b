"""A multimodal language model under context parallelism: sequences of twelve tokens are cut over three ranks, keys and values are gathered for the causal attention. Four places of each row, not side by side,
hold an image token; every rank runs the small vision tower on all images and lays the features of its own image tokens into its part of the embeddings. Rows in two micro-batches, all gradients summed over the
context ranks.

The bug: features are laid in by masked_scatter over the own part, which takes the features of each row from the first on, although the earlier ranks have used some of them. After reports on Qwen2-VL and
LLaVA under sequence parallelism (image features and placeholders of a shard do not match), in verl, ms-swift and others.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, LENGTH, VOCABULARY, WIDTH, PATCHES, PIXELS = 5, 12, 11, 8, 4, 6
IMAGE = 0


class Multimodal(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.vision = nn.Sequential(nn.Linear(PIXELS, 10), nn.GELU(), nn.Linear(10, WIDTH))
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 14), nn.GELU(), nn.Linear(14, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def decode(self, x, lo, gather):
        """x: the columns from lo on."""
        x = x + self.places.weight[lo : lo + x.shape[1]]
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, -1)
        k, v = gather(k), gather(v)
        scores = q @ k.transpose(1, 2) / WIDTH**0.5
        later = torch.arange(k.shape[1]) > lo + torch.arange(x.shape[1])[:, None]
        x = x + self.out(scores.masked_fill(later, -1e9).softmax(-1) @ v)
        return self.head(x + self.mlp(self.norm_2(x)))

    def forward(self, ids, pixels):
        x = self.words(ids)
        features = self.vision(pixels)
        x = x.masked_scatter((ids == IMAGE)[..., None], features.flatten(0, 1))
        return self.decode(x, 0, lambda t: t)


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        fctx.group, fctx.length = group, x.shape[1]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad.split(fctx.length, 1)[dist.get_rank(fctx.group)].contiguous(), None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Multimodal()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        at = torch.rand(ROWS, LENGTH, generator=g).argsort(1)[:, :PATCHES]
        ids[:, :LENGTH].scatter_(1, at, IMAGE)
        labels = ids[:, 1:].masked_fill(ids[:, 1:] == IMAGE, -100)
        return {
            "ids": ids[:, :-1].contiguous(),
            "labels": labels,
            "pixels": torch.randn(ROWS, PATCHES, PIXELS, generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], rows["pixels"]).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum")
        return loss, (rows["labels"] != -100).sum()

    def merge(self, embeddings, features, ids, columns):
        is_image = ids == IMAGE
        number = (is_image.cumsum(1) - 1).clamp(min=0)[:, columns]
        taken = features.gather(1, number[..., None].expand(-1, -1, features.shape[-1]))
        return torch.where(is_image[:, columns, None], taken, embeddings)

    def step(self, model, batch, ctx):
        group = ctx.group("cp")
        for p in model.parameters():
            p.grad = None
        each = LENGTH // ctx.axes["cp"]
        columns = slice(ctx.coords["cp"] * each, (ctx.coords["cp"] + 1) * each)
        count = (batch["labels"] != -100).sum()
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in batch.items()}
            features = model.vision(part["pixels"])
            x = self.merge(model.words(part["ids"][:, columns]), features, part["ids"], columns)
            logits = model.decode(x, columns.start, lambda t: GatherSequence.apply(t, group))
            labels = part["labels"][:, columns].flatten()
            loss = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum")
            (loss / count).backward()
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def merge(self, embeddings, features, ids, columns):
        merged = []
        for row, feature, own in zip(embeddings, features, ids[:, columns]):
            merged.append(row.masked_scatter((own == IMAGE)[:, None], feature))
        return torch.stack(merged)


EXPECT = dict(
    right=[
        r"image|vision|feature|placeholder|patch|pixel",
        r"first|offset|start|begin|earlier|previous|number|count|wrong (feature|patch)|other (feature|patch)|order|index|mismatch|not match|position",
        r"merge|masked_scatter|own (part|shard|chunk|columns|slice)|local|shard|chunk|rank|context|cp\b",
    ],
    place=[r"\bmerge\b", r"masked_scatter", r"features?\b.{0,60}(shard|chunk|rank|columns)"],
    wrong=[
        r"causal|attention mask|position embedding",
        r"(missing|not|never) .{0,15}(all.?reduce|reduced)|vision.{0,40}(three times|counted|replicated)|divided",
        r"GatherSequence.{0,50}(wrong|missing|backward)|labels? (shift|misalign)|valid tokens",
        r"rows? of (another|other)|micro.?batch",
    ],
)
WHY = (
    "merge has to give the own image tokens those of the row's four features that belong to them, i.e. beginning after the number of image tokens in the columns of earlier ranks. masked_scatter over the own columns begins "
    "with feature 0 on each rank. Rank 0 is right, ranks 1 and 2 are wrong in every row that has image tokens before their columns: the first features are used several times, the last ones never. Through attention, and "
    "the sum over ranks, the gradients of all parameters are wrong on all ranks. Fix: count the image tokens of the earlier columns (cumsum over the whole row)."
)
