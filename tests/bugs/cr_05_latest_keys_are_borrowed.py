"""A decoder in which later layers borrow keys and values (as in Gemma 3n): layers 0 (sliding
window 3) and 1 (full) make their own, layers 2 (sliding) and 3 (full) use those of the last layer
of their own type. A pipeline of two stages by hand (layers 0, 1 and 2, 3) with three micro-batches
(2, 2 and 1 rows), first all forwards, then all backwards. The wire carries the hidden
values and both pairs of keys and values, and their gradients on the way back.

Bug: the stage gives a borrowing layer the pair that was kept last, whatever its type. After ports
of cross-layer sharing from models in which all layers are of one type.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2}}}}
WORDS, D, T, ROWS, WINDOW = 12, 6, 7, 5, 3
TYPES = ("sliding", "full", "sliding", "full")


class Layer(nn.Module):
    def __init__(self, kind, lends):
        super().__init__()
        self.kind, self.lends = kind, lends
        self.norm = nn.LayerNorm(D)
        self.q = nn.Linear(D, D, bias=False)
        if lends:
            self.kv = nn.Linear(D, 2 * D, bias=False)
        self.up = nn.Linear(D, 9)
        self.down = nn.Linear(9, D)

    def forward(self, x, pair=None):
        h = self.norm(x)
        if self.lends:
            pair = self.kv(h)
        k, v = pair.chunk(2, -1)
        ago = torch.arange(T)[:, None] - torch.arange(T)
        closed = ago < 0
        if self.kind == "sliding":
            closed = closed | (ago >= WINDOW)
        scores = (self.q(h) @ k.transpose(1, 2) * D**-0.5).masked_fill(closed, float("-inf"))
        x = x + scores.softmax(-1) @ v
        return x + self.down(F.silu(self.up(x))), pair


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, D)
        self.layers = nn.ModuleList([Layer(kind, i < 2) for i, kind in enumerate(TYPES)])
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, WORDS)

    def forward(self, ids):
        x, kept = self.words(ids), {}
        for layer in self.layers:
            x, pair = layer(x, kept.get(layer.kind))
            if layer.lends:
                kept[layer.kind] = pair
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 51)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 510)
        ids = torch.randint(WORDS, (ROWS, T + 1), generator=g)
        return {"ids": ids[:, :-1], "next": ids[:, 1:]}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), rows["next"].flatten(), reduction="sum")
        return loss, rows["next"].numel()

    def borrowed(self, layer, kept):
        return kept[layer.kind]

    def run(self, layers, x, kept):
        for layer in layers:
            x, pair = layer(x, None if layer.lends else self.borrowed(layer, kept))
            if layer.lends:
                kept[layer.kind] = pair
        return x

    def first_stage(self, model, batch, parts, other):
        sent = []
        for part in parts:
            kept = {}
            x = self.run(model.layers[:2], model.words(batch["ids"][part]), kept)
            sent.append((x, kept["sliding"], kept["full"]))
            for tensor in sent[-1]:
                dist.send(tensor.detach().contiguous(), other)
        for tensors in sent:
            grads = [torch.empty_like(t) for t in tensors]
            for grad in grads:
                dist.recv(grad, other)
            torch.autograd.backward(tensors, grads)

    def second_stage(self, model, batch, parts, other):
        run = []
        for part in parts:
            x, sliding, full = (
                model.head.weight.new_empty(len(part), T, width) for width in (D, 2 * D, 2 * D)
            )
            for tensor in (x, sliding, full):
                dist.recv(tensor, other)
                tensor.requires_grad_()
            out = self.run(model.layers[2:], x, {"sliding": sliding, "full": full})
            logits = model.head(model.norm(out)).flatten(0, 1)
            wanted = batch["next"][part].flatten()
            run.append((F.cross_entropy(logits, wanted, reduction="sum"), (x, sliding, full)))
        for loss, tensors in run:
            (loss / batch["next"].numel()).backward()
            for tensor in tensors:
                grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                dist.send(grad.contiguous(), other)

    def step(self, model, batch, ctx):
        group, stage = ctx.group("pp"), ctx.coords["pp"]
        other = dist.get_global_rank(group, 1 - stage)
        parts = torch.arange(ROWS).split(2)
        (self.second_stage if stage else self.first_stage)(model, batch, parts, other)
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def borrowed(self, layer, kept):
        return next(reversed(kept.values()))


EXPECT = dict(
    right=[
        r"borrow|keys?|values?|\bkv\b|pair|kept|shar(e|ing)",
        r"type|kind|sliding|full|last (kept|pair|layer|entry|made)|latest|wrong (layer|pair|kv)|"
        r"reversed|most recent",
        r"layers?\W{0,2}2|third layer|sliding|second stage|stage 1|latest|last|most recent|"
        r"reversed|borrowed",
    ],
    place=[r"\bborrowed\b", r"reversed", r"layers\.2", r"kept", r"layers\.0\.kv", r"\brun\b"],
    wrong=[
        r"window.{0,30}(wider|off.by.one|too long)",
        r"(order|sequence) of (the )?(send|recv|receive|message)",
        r"(missing|not|never|twice).{0,20}(all.?reduc|summed over pp)",
        r"(gradients?|grad) of the (pair|keys).{0,40}(not sent|lost|dropped)",
        r"micro.?batch.{0,30}(mix|wrong|dropp)",
    ],
)
WHY = """Layer 2 is a sliding layer and borrows the keys and values of layer 0, the last sliding
layer that makes its own. Buggy.borrowed returns the last entry of the dict of kept pairs, which is
that of layer 1 (full), for both of the borrowing layers. So layer 2 attends to the wrong keys and
values (layer 3 is right by chance), the pair of layer 0 gets no gradient from above, and all
parameters are off. The wire, masks and sums are right. Fix: kept[layer.kind]."""
