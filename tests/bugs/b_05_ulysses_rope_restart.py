"""Ulysses sequence parallelism with rotary embeddings, applied before the all-to-all.
After DeepSpeed/verl Ulysses reports: rotary positions start anew on each rank."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collective
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
ROWS, LENGTH, WIDTH, HEADS, VOCAB = 5, 9, 12, 3, 16


def rotate(x, positions):
    """(rows, positions, heads, size): pairs of features turned by an angle of the position."""
    half = x.shape[-1] // 2
    angle = positions[:, None].to(x.dtype) * 0.5 ** torch.arange(half, dtype=x.dtype)
    sin, cos = angle.sin()[:, None], angle.cos()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)
        )
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, positions, swap):
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(2 * q, positions), rotate(2 * k, positions)
        q, k, v = (swap(t, "heads").transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.o_proj(swap(y, "positions").flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_norm, self.self_attn = nn.RMSNorm(WIDTH), Attention()
        self.post_norm, self.mlp = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, positions, swap):
        x = x + self.self_attn(self.input_norm(x), positions, swap)
        return x + F.silu(self.mlp(self.post_norm(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids, positions=None, swap=lambda t, _: t):
        positions = torch.arange(ids.shape[1]) if positions is None else positions
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, positions, swap)
        return self.lm_head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=g)
        valid = torch.arange(LENGTH) < lengths
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(~valid, -100)}

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.token_loss(model(rows["ids"]), rows["labels"]), (rows["labels"] != -100).sum()

    def positions(self, ids, ctx):
        return ctx.rank * ids.shape[1] + torch.arange(ids.shape[1])

    def step(self, model, batch, ctx):
        def swap(x, wanted):
            cut, joined = (2, 1) if wanted == "heads" else (1, 2)
            parts = [t.contiguous() for t in x.chunk(ctx.world_size, dim=cut)]
            got = collective.all_to_all([torch.empty_like(p) for p in parts], parts)
            return torch.cat(got, dim=joined)

        mine = {k: v.chunk(ctx.world_size, dim=1)[ctx.rank] for k, v in batch.items()}
        logits = model(mine["ids"], self.positions(mine["ids"], ctx), swap)
        (self.token_loss(logits, mine["labels"]) / (batch["labels"] != -100).sum()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def positions(self, ids, ctx):
        return torch.arange(ids.shape[1])


EXPECT = dict(
    right=[r"forward|output|activation", r"self_attn|attention|o_proj"],
    place=[r"layers\.0\.self_attn", r"ranks? (1|2)\b"],
    wrong=[r"never reduced|not reduced|missing reduction", r"counted (twice|3 times)", r"averag"],
)
WHY = (
    "Rotary positions start at 0 on each rank of sp, so queries and keys of different shards have "
    "wrong relative angles: the forward is wrong from layers.0.self_attn on."
)
