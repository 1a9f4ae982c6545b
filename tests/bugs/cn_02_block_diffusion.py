"""A block diffusion language model (as BD3-LM): a transformer reads the noised and the clean copy
of each text at once, 10 tokens in blocks of 3 (the last block has one), under a mask in three
parts. Context parallel over three ranks (4, 3 and 3 positions, each in both copies; keys and values
are gathered), micro-batches of two of three rows. The loss is over masked tokens, with weight 1/t.

Bug: the mask that ranks build for their own queries lets a noised token see the clean copy of its
own block also (>= for >), so that the answer lies open. After reports on block diffusion training
whose loss falls to nothing.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
WORDS, D, HEADS, L, BLOCK, ROWS = 9, 8, 2, 10, 3, 3
MASKED = WORDS


def attends(q, k):
    """Positions 0..L-1 are the noised copy, L..2L-1 the clean one."""
    q, k = q[:, None], k[None, :]
    q_clean, k_clean = q >= L, k >= L
    q_block, k_block = q % L // BLOCK, k % L // BLOCK
    within = ~q_clean & ~k_clean & (q_block == k_block)
    context = ~q_clean & k_clean & (q_block > k_block)
    causal = q_clean & k_clean & (q_block >= k_block)
    return within | context | causal


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, own, group):
        ctx.own, ctx.group = own, group
        full = x.new_zeros(x.shape[0], x.shape[1], 2 * L, x.shape[3])
        full[:, :, own] = x
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g[:, :, ctx.own], None, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm_mlp = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 11), nn.GELU(), nn.Linear(11, D))

    def forward(self, x, mask, gather):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        y = F.scaled_dot_product_attention(q, gather(k), gather(v), attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS + 1, D)
        self.places = nn.Parameter(torch.randn(L, D))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, WORDS)
        self.own, self.group = None, None
        self.mask = attends

    def gather(self, x):
        return x if self.own is None else Gather.apply(x, self.own, self.group)

    def forward(self, noised, clean):
        """ids of the positions at hand in both copies -> logits for the noised ones"""
        everything = torch.arange(2 * L, device=noised.device)
        own = everything if self.own is None else self.own
        mask = self.mask(own, everything)
        x = self.words(torch.cat([noised, clean], 1)) + self.places[own % L]
        for block in self.blocks:
            x = block(x, mask, self.gather)
        return self.head(self.norm(x[:, : noised.shape[1]]))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 21)
        return Denoiser()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 210)
        clean = torch.randint(WORDS, (ROWS, L), generator=g)
        t = 0.3 + 0.6 * torch.rand(ROWS, -(-L // BLOCK), generator=g)
        t = t.repeat_interleave(BLOCK, 1)[:, :L]
        hidden = torch.rand(ROWS, L, generator=g) < t
        hidden[:, ::4] = True
        return {"clean": clean, "noised": clean.masked_fill(hidden, MASKED), "t": t}

    def loss_sum(self, model, rows):
        logits = model(rows["noised"], rows["clean"])
        loss = F.cross_entropy(logits.transpose(1, 2), rows["clean"], reduction="none")
        loss = loss * (rows["noised"] == MASKED) / rows["t"]
        return loss.sum(), rows["clean"].numel()

    def distribute(self, model, ctx):
        self.own = torch.arange(L).tensor_split(ctx.axes["cp"])[ctx.coords["cp"]]
        model.own, model.group = torch.cat([self.own, self.own + L]), ctx.group("cp")
        return model

    def step(self, model, batch, ctx):
        for rows in torch.arange(ROWS).split(2):
            part = {k: v[rows][:, self.own] for k, v in batch.items()}
            loss, _ = self.loss_sum(model, part)
            (loss / (ROWS * L)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("cp"))


def block_diffusion_mask(q_idx, kv_idx):
    q_idx, kv_idx = q_idx[:, None], kv_idx[None, :]
    x0_q, x0_kv = q_idx >= L, kv_idx >= L
    block_q = torch.where(x0_q, q_idx - L, q_idx) // BLOCK
    block_kv = torch.where(x0_kv, kv_idx - L, kv_idx) // BLOCK
    block_diagonal = (block_q == block_kv) & (x0_q == x0_kv)
    block_causal = (block_q >= block_kv) & x0_kv
    return block_diagonal | block_causal


class Buggy(Clean):
    def distribute(self, model, ctx):
        model = super().distribute(model, ctx)
        model.mask = block_diffusion_mask
        return model


EXPECT = dict(
    right=[
        r"mask|attend|visib|sees?\b|leak",
        r"\bblock",
        r"clean|x_?0|\bown\b|same block|>=|>|strict|leak|answer|target|offset",
    ],
    place=[r"block_diffusion_mask", r"block_causal", r"block_q >= block_kv", r"\battends\b"],
    wrong=[
        r"positions? .{0,30}(restart|from zero|local|wrong)",
        r"Gather.{0,40}(backward|adjoint).{0,30}(wrong|miss)",
        r"(not|never|missing|twice).{0,25}(all.?)?reduc",
        r"last block.{0,40}(wrong|drop|missing)",
        r"1\s*/\s*t.{0,30}(wrong|missing|twice)",
        r"future (clean )?block",
    ],
)
WHY = """In block_diffusion_mask one block_causal part with >= serves both copies. It is right for
clean queries, but a noised query may see clean keys of earlier blocks only (block_q > block_kv):
with >= it sees the clean copy of its own block, that is the very tokens it has to predict. The
outputs of the ranks are those of another model. A right cause says that noised tokens attend to
the clean tokens of their own block. The fix: > for noised queries, >= for clean ones."""
