"""A sentence encoder (transformers' BertModel) trained with a Matryoshka loss and GradCache, data parallel over three ranks: all texts of a rank (a query and three passages in each row) are encoded without a graph, the loss of the truncated and renormalised embeddings of 8, 4 and 2 dimensions gives
their gradients, the texts are encoded again in micro-batches of rows and the cached gradients are sent through. Gradients are summed by hand.

The bug: the gradients of the truncated embeddings are written into the cache's leading columns instead of being added, so that the smallest dimension's gradient replaces those of the larger ones where they overlap. After sentence-transformers' MatryoshkaLoss around
CachedMultipleNegativesRankingLoss (decorators on the cached forward; 'truncated gradients' issues).
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import BertConfig, BertModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, TEXTS, WORDS, VOCABULARY, WIDTH = 8, 4, 5, 23, 8
DIMENSIONS, WEIGHTS = (8, 4, 2), (1.0, 0.8, 0.5)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=12,
            max_position_embeddings=WORDS,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.3,
            attn_implementation="eager",
        )
        return BertModel(config, add_pooling_layer=False)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(2, WORDS + 1, (ROWS, TEXTS, 1), generator=g)
        return {
            "ids": torch.randint(1, VOCABULARY, (ROWS, TEXTS, WORDS), generator=g),
            "mask": (torch.arange(WORDS) < lengths).long(),
            "positive": torch.randint(TEXTS - 1, (ROWS,), generator=g),
        }

    def embed(self, model, rows):
        mask = rows["mask"].flatten(0, 1)
        hidden = model(input_ids=rows["ids"].flatten(0, 1), attention_mask=mask).last_hidden_state
        mask = mask[..., None].to(hidden.dtype)
        return ((hidden * mask).sum(1) / mask.sum(1)).unflatten(0, (-1, TEXTS))

    def ranking(self, embeddings, positive):
        e = F.normalize(embeddings, dim=-1)
        scores = (e[:, 1:] @ e[:, 0, :, None]).squeeze(-1) * 5
        return F.cross_entropy(scores, positive, reduction="sum")

    def loss_sum(self, model, rows):
        e = self.embed(model, rows)
        losses = [
            w * self.ranking(e[..., :d], rows["positive"]) for d, w in zip(DIMENSIONS, WEIGHTS)
        ]
        return sum(losses), len(e)

    def cache_gradients(self, embeddings, positive):
        cache = torch.zeros_like(embeddings)
        for dim, weight in zip(DIMENSIONS, WEIGHTS):
            shrunk = embeddings[..., :dim].detach().requires_grad_()
            (weight * self.ranking(shrunk, positive) / ROWS).backward()
            cache[..., :dim] += shrunk.grad
        return cache

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: x.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, x in batch.items()}
        with torch.no_grad():
            embeddings = self.embed(model, mine)
        cache = self.cache_gradients(embeddings, mine["positive"])
        for i in range(2):
            rows = {k: x.tensor_split(2)[i] for k, x in mine.items()}
            (self.embed(model, rows) * cache.tensor_split(2)[i]).sum().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def cache_gradients(self, embeddings, positive):
        cache = torch.zeros_like(embeddings)
        for dim, weight in zip(DIMENSIONS, WEIGHTS):
            shrunk = embeddings[..., :dim].detach().requires_grad_()
            (weight * self.ranking(shrunk, positive) / ROWS).backward()
            cache[..., :dim] = shrunk.grad
        return cache


EXPECT = dict(
    right=[
        r"cache|cached|dimension|truncat|columns?|embedding|surrogate|embed",
        r"overwrit|replac|instead of (being )?add|not (added|accumulated)|last (one )?(dimension|loss)|lost|lack|missing|incomplete|wrong gradient|gradient .{0,40}(sent|passed|goes) (in|back)",
    ],
    place=[r"cache_gradients", r"cache\[", r"shrunk", r"ranking|embed\b", r"\.backward\(\)"],
    wrong=[
        r"not reduced|never reduced|missing (all.?)?reduc|reduced twice",
        r"micro.?batch(es)? .{0,30}(lost|dropped|overwritten|twice|again)|only the last micro.?batch",
        r"divisor|mean of means|token count|world.?size",
        r"(wrong|other) rows|forward .{0,20}is wrong",
    ],
)
WHY = (
    "The loop runs over 8, 4 and 2 dimensions and the gradient of each should be added to the leading columns of the cache; Buggy assigns, so that columns 0-1 have the 2-dimensional loss's gradient only, columns 2-3 that of the 4-dimensional one, columns 4-7 that of the whole (right). "
    "The embeddings' gradient is wrong in the first four of eight columns for every row on all three ranks, in both micro-batches, and with it all parameters' gradients. A right cause says that cached embedding gradients are overwritten (terms of the loss lost) in cache_gradients. "
    "Forward, reduction and divisor are right. Fix: cache[..., :dim] += shrunk.grad."
)
