"""A small recurrent language model whose head is tied to its word embedding, trained data parallel on three ranks (4, 3 and 3 of ten sentences, two micro-batches a rank). After the second backward the
gradients are summed over the ranks in one flat message, divided by the number of target words of all ranks, and clipped to a global norm.

The bug: the norm is taken over the parameters, each once, but the gradients are then multiplied in a walk over the modules, and the walk meets the tied weight in the embedding and again in the head.
After public reports about per-module clipping and gradient scaling loops (module by module, recurse=False) that treat shared parameters twice, as in issues about tied embeddings in clip_grad_norm_
written by hand.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
WORDS, WIDTH, LENGTH, ROWS = 13, 7, 6, 10


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.enter = nn.Linear(2 * WIDTH, 9)
        self.leave = nn.Linear(9, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids)
        state = torch.zeros_like(x[:, 0])
        states = []
        for t in range(ids.shape[1]):
            state = state + self.leave(torch.tanh(self.enter(torch.cat([x[:, t], state], -1))))
            states.append(state)
        return self.head(self.norm(torch.stack(states, 1)))


class Clean:
    after = "clip"
    max_norm = 0.2

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Language()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=g)
        length = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g)
        labels = ids[:, 1:].masked_fill(torch.arange(LENGTH) >= length, -100)
        return {"ids": ids[:, :-1].clone(), "labels": labels}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"])
        loss = F.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), ignore_index=-100, reduction="sum"
        )
        return loss, int((rows["labels"] != -100).sum())

    def scale(self, model, factor):
        for p in model.parameters():
            p.grad.mul_(factor)

    def clip(self, model):
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        self.scale(model, (self.max_norm / (norm + 1e-6)).clamp(max=1.0))

    def reduce(self, model, count):
        grads = [p.grad for p in model.parameters()]
        flat = torch.cat([g.flatten() for g in grads] + [count.reshape(1)])
        dist.all_reduce(flat)
        flat, total = flat[:-1], flat[-1]
        for g, piece in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(piece.view_as(g) / total)

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = 0
        for n in range(2):
            loss, words = self.loss_sum(model, {k: v.tensor_split(2)[n] for k, v in mine.items()})
            loss.backward()
            count += words
        self.reduce(model, torch.as_tensor(count, dtype=ctx.dtype))
        self.clip(model)


class Buggy(Clean):
    def scale(self, model, factor):
        for module in model.modules():
            for p in module.parameters(recurse=False):
                p.grad.mul_(factor)


EXPECT = dict(
    right=[
        r"tied|shared|words|head|same (parameter|tensor|weight)",
        r"clip|scale|factor|norm|mul_|multipl|coefficient",
        r"twice|two times|second time|again|squared?|two (modules|names)|both|each (module|name)|per module",
    ],
    place=[r"\bscale\b", r"mul_", r"clip", r"words", r"head"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed) (twice|again)",
        r"forward (is|computes) .{0,20}wrong|backward formula",
        r"micro.?batch(es)? .{0,20}(lost|dropped|never read)|only the last micro.?batch",
        r"mean of means|divi(ded|des) by (its|their) own|wrong (number|count) of (words|tokens)",
    ],
)
WHY = (
    "Buggy.scale walks over model.modules() and their own parameters (recurse=False); the tied weight is found in words and in head, and so its gradient is multiplied by max_norm / norm twice, all others' "
    "once. On all three ranks alike, the gradient of words.weight (head.weight) is too small by the clip factor. The gradients before the clip (backward, flat all-reduce, division by the number of words) are "
    "right, and so is the norm, which counts each parameter once. Fix: multiply each Parameter once (model.parameters() gives shared ones once), or keep a set of the seen ones."
)
