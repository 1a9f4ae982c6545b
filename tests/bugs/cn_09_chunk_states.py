"""A retention (linear attention with decay) language model: rows over dp (2; 4 and 3 of 7 rows,
micro-batches of two), three heads over tp (2; two and one). Ranks compute retention in chunks of 3
of 8 tokens (the last has two) as a custom function, which keeps the state at the entrance of each
chunk and computes the chunk again in the backward.

Bug: the states are kept by `state.detach()`, which shares memory, and the state is then changed in
place. All kept states are the last one when the backward comes (no version is checked, as they lie
on ctx). The outputs are right. After aliasing errors in hand-written chunked recurrences.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
WORDS, D, HEADS, KEY, VALUE, T, CHUNK, ROWS = 10, 6, 3, 3, 2, 8, 3, 7


def plain_retention(q, k, v, decay):
    at = torch.arange(q.shape[2], device=q.device)
    apart = at[:, None] - at
    weight = decay[:, None, None] ** apart.clamp(min=0) * (apart >= 0)
    return (q @ k.transpose(-1, -2) * weight) @ v


def one_chunk(q, k, v, decay, state):
    """-> output of the chunk; keys and values are to be added to the decayed state by the caller"""
    at = torch.arange(q.shape[2], device=q.device)
    entered = decay[:, None, None] ** (at[:, None] + 1)
    left = decay[:, None, None] ** (q.shape[2] - 1 - at[:, None])
    out = plain_retention(q, k, v, decay) + (q * entered) @ state
    return out, decay[:, None, None] ** q.shape[2], (k * left).transpose(-1, -2) @ v


class ChunkedRetention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, decay):
        state = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
        outs, ctx.states = [], []
        for part in zip(*(x.split(CHUNK, 2) for x in (q, k, v)), strict=True):
            ctx.states.append(state.clone())
            out, shrink, added = one_chunk(*part, decay, state)
            state.mul_(shrink).add_(added)
            outs.append(out)
        ctx.save_for_backward(q, k, v, decay)
        return torch.cat(outs, 2)

    @staticmethod
    def backward(ctx, grad):
        *qkv, decay = ctx.saved_tensors
        parts = list(zip(*(x.split(CHUNK, 2) for x in (*qkv, grad)), strict=True))
        grad_state, grad_decay = torch.zeros_like(ctx.states[0]), torch.zeros_like(decay)
        grads = []
        for (*part, g), state in zip(reversed(parts), reversed(ctx.states), strict=True):
            inputs = [x.detach().requires_grad_() for x in (*part, decay, state)]
            with torch.enable_grad():
                out, shrink, added = one_chunk(*inputs)
                after = shrink * inputs[4] + added
            *own, of_decay, grad_state = torch.autograd.grad((out, after), inputs, (g, grad_state))
            grads.append(own)
            grad_decay += of_decay
        return *(torch.cat(x[::-1], 2) for x in zip(*grads, strict=True)), grad_decay


class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.q, self.k = (nn.Parameter(torch.randn(HEADS, KEY, D) / 2) for _ in "qk")
        self.v, self.gate = (nn.Parameter(torch.randn(HEADS, VALUE, D) / 2) for _ in "vg")
        self.decay = nn.Parameter(1.0 + torch.randn(HEADS))
        self.out = nn.Parameter(torch.randn(HEADS, VALUE, D) / 2)
        self.retention, self.group = plain_retention, None

    def forward(self, x):
        h = self.norm(x)
        if self.group is not None:
            h = CopyIn.apply(h, self.group)
        q, k, v, gate = (
            torch.einsum("btd,hed->bhte", h, w) for w in (self.q, self.k, self.v, self.gate)
        )
        y = self.retention(q, k, v, torch.sigmoid(self.decay)) * F.silu(gate)
        y = torch.einsum("bhte,hed->btd", y, self.out)
        return x + (y if self.group is None else SumOut.apply(y, self.group))


class RetentionModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, D)
        self.layers = nn.Sequential(Layer(), Layer())
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, WORDS)

    def forward(self, ids):
        return self.head(self.norm(self.layers(self.words(ids))))


class Clean:
    retention = ChunkedRetention

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 91)
        return RetentionModel()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 910)
        return {"ids": torch.randint(WORDS, (ROWS, T + 1), generator=g)}

    def loss_sum(self, model, rows):
        ids = rows["ids"]
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="sum")
        return loss, ids[:, 1:].numel()

    def distribute(self, model, ctx):
        own = torch.arange(HEADS).tensor_split(ctx.axes["tp"])[ctx.coords["tp"]]
        for layer in model.layers:
            for name in ("q", "k", "v", "gate", "decay", "out"):
                setattr(layer, name, nn.Parameter(getattr(layer, name).detach()[own].clone()))
            layer.retention, layer.group = self.retention.apply, ctx.group("tp")
        return model

    def step(self, model, batch, ctx):
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in own.split(2):
            loss, _ = self.loss_sum(model, {"ids": batch["ids"][part]})
            (loss / (ROWS * T)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class RetentionInChunks(ChunkedRetention):
    @staticmethod
    def forward(ctx, q, k, v, decay):
        state = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
        outs, ctx.states = [], []
        for part in zip(*(x.split(CHUNK, 2) for x in (q, k, v)), strict=True):
            ctx.states.append(state.detach())
            out, shrink, added = one_chunk(*part, decay, state)
            state.mul_(shrink).add_(added)
            outs.append(out)
        ctx.save_for_backward(q, k, v, decay)
        return torch.cat(outs, 2)


class Buggy(Clean):
    retention = RetentionInChunks


EXPECT = dict(
    right=[
        r"\bstates?\b|ctx\.states|\bsaved\b|\bkept\b",
        r"in.?place|alias|share[sd]? (the )?(memory|storage)|same (memory|storage|tensor)|overwrit|"
        r"mul_|add_|detach|clone|mutat|changed after|modified",
        r"RetentionInChunks|retention|chunk|backward",
    ],
    place=[
        r"RetentionInChunks",
        r"ctx\.states",
        r"state\.detach",
        r"state\.mul_",
        r"\bretention\b",
    ],
    wrong=[
        r"detach.{0,50}(cuts?|stops?|blocks?|breaks?|severs?).{0,20}(graph|gradient)",
        r"(CopyIn|SumOut).{0,40}(wrong|miss)",
        r"(not|never|missing|twice).{0,25}(all.?)?reduc",
        r"decay.{0,40}(exponent|power).{0,20}(wrong|off)",
        r"last chunk.{0,30}(dropped|missing|wrong length)",
        r"(output|forward).{0,20}(is|are) wrong",
    ],
)
WHY = """RetentionInChunks.forward keeps state.detach() for each chunk: the same memory as state,
which state.mul_().add_() then changes in place. In the backward every chunk is computed again from
the final state in place of the one at its entrance, so the gradients of q and decay (and of what is
before them) are wrong, while outputs and the gradients of k and v at the last layer are right. A
right cause says that the kept states alias the state changed in place. The fix is state.clone()."""
