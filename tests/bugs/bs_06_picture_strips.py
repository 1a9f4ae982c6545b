"""transformers' ViT as a tile encoder for large pictures: each strip of two rows of patches, with a class token of its own, goes through the layers alone, and the class tokens of the three strips are averaged for the
regression head. The strips are spread over three ranks, all ranks see all pictures; the class tokens are summed over the ranks, and the head is computed by all alike. Two micro-batches.

The bug: a rank embeds its strip by calling the library's embeddings with interpolate_pos_encoding=True, as the strip is smaller than config.image_size: the whole picture's position table is squeezed into
the strip on each rank, in place of the strip's own rows of the table. After tiled / sharded vision encoders built on HF's ViT, where only the flag silences the size error.
"""

import torch
import torch.distributed as dist
from torch import nn
from transformers import ViTConfig, ViTModel

TOPOLOGY = {"pools": {"train": {"axes": {"strip": 3}}}}
SIDE, PATCH, STRIPS, WIDTH, ROWS = 12, 2, 3, 8, 5
GRID = SIDE // PATCH
LINES = GRID // STRIPS  # rows of patches in a strip


class TiledViT(nn.Module):
    def __init__(self):
        super().__init__()
        config = ViTConfig(
            hidden_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=12,
            image_size=SIDE,
            patch_size=PATCH,
            num_channels=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.4,
        )
        self.vit = ViTModel(config, add_pooling_layer=False)
        self.head = nn.Linear(WIDTH, 2)

    def encode(self, tokens):
        for layer in self.vit.layers:
            tokens = layer(tokens, None)
        return self.vit.layernorm(tokens)[:, 0]

    def strip_tokens(self, pixels, strip):
        embeddings = self.vit.embeddings
        start = 1 + strip * LINES * GRID
        table = embeddings.position_embeddings
        patches = embeddings.patch_embeddings(pixels) + table[:, start : start + LINES * GRID]
        first = (embeddings.cls_token + table[:, :1]).expand(len(pixels), -1, -1)
        return torch.cat([first, patches], 1)

    def forward(self, pixels):
        strips = pixels.split(LINES * PATCH, dim=2)
        cls = [self.encode(self.strip_tokens(s, i)) for i, s in enumerate(strips)]
        return self.head(torch.stack(cls).mean(0))


class SumOverStrips(torch.autograd.Function):
    """Every rank computes the same head and loss from the sum."""

    @staticmethod
    def forward(fctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return TiledViT().train()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "pixels": torch.randn(ROWS, 1, SIDE, SIDE, generator=g),
            "y": torch.randn(ROWS, 2, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["pixels"]) - rows["y"]).square().sum(), len(rows["y"])

    def embed(self, model, pixels, strip):
        return model.strip_tokens(pixels, strip)

    def step(self, model, batch, ctx):
        strip, group = ctx.coords["strip"], ctx.group("strip")
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in batch.items()}
            pixels = part["pixels"].split(LINES * PATCH, dim=2)[strip]
            cls = model.encode(self.embed(model, pixels, strip))
            out = model.head(SumOverStrips.apply(cls, group) / STRIPS)
            ((out - part["y"]).square().sum() / ROWS).backward()
        for p in model.vit.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def embed(self, model, pixels, strip):
        return model.vit.embeddings(pixels, interpolate_pos_encoding=True)


EXPECT = dict(
    right=[
        r"position|pos_enc|interpolat",
        r"interpolat|whole|full|all (the )?(rows|positions)|other (rows|places|strip|rank)|own (rows|strip|slice|part)|strip|squeez|slice|(same|all) positions|offset|wrong (rows|positions|place)|global|local",
    ],
    place=[
        r"position_embeddings|position table|pos_encoding",
        r"\bembed\b|vit\.embeddings|ViTEmbeddings|strip_tokens",
        r"interpolat",
    ],
    wrong=[
        r"(not|never) reduced|reduced twice|missing (all.?)?reduc|counted (twice|three times)",
        r"micro.?batch.{0,30}(lost|dropped|overwritten)|mean of means|divisor|wrong group",
        r"head\..{0,40}(reduced|wrong rows)|SumOverStrips.{0,40}(wrong|missing)|(halo|neighbou?r).{0,30}(missing|zero)",
    ],
)
WHY = (
    "With interpolate_pos_encoding=True the library interpolates the whole 6 x 6 table of positions to the size of the strip, 2 x 6, so each of the three ranks adds a squeezed copy of the whole table where it should add its own two rows of it. "
    "The forward is wrong on all ranks, and with it all gradients; position_embeddings' gradient in particular is spread over all rows of the table by each rank. "
    "A right cause says that the position embeddings that a rank adds are not those of its strip (interpolated from the whole table). Collectives and reductions are right. Fix: slice the table by the strip's rows."
)
