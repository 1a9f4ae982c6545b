"""transformers' ViTModel with its token sequence cut over three sequence parallel ranks: twelve patches, four on each rank, and the [CLS] token in front of those of rank 0. Keys and values are gathered by an attention function that
is registered with transformers; the layers are the library's own. The classifier reads [CLS], so the loss is on rank 0. Two micro-batches, gradients summed over the ranks.

The bug: every rank takes the rows lo to hi of the position table for its patches lo to hi; row 0 of a ViT's table belongs to [CLS], so that all patches get the position of the patch before. After the reports on loading and cutting
position tables with a class token (timm's resize_pos_embed with num_prefix_tokens, MAE and OpenCLIP's sequence parallel ports).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
ROWS, HEIGHT, WIDTH, PATCH, CLASSES, MICRO = 6, 6, 8, 2, 5, 2
PATCHES = (HEIGHT // PATCH) * (WIDTH // PATCH)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        config = ViTConfig(
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=12,
            image_size=(HEIGHT, WIDTH),
            patch_size=PATCH,
            num_channels=2,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.4,
            attn_implementation="eager",
        )
        self.vit = ViTModel(config, add_pooling_layer=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, pixels):
        return self.head(self.vit(pixels).last_hidden_state[:, 0])


class GatherTokens(torch.autograd.Function):
    """Keys and values of all tokens on each rank; every rank asks other queries, so the gradients are summed."""

    @staticmethod
    def forward(fctx, own, lo, group):
        fctx.place, fctx.group = (lo, lo + own.shape[-2]), group
        full = own.new_zeros(*own.shape[:-2], PATCHES + 1, own.shape[-1])
        full[..., lo : lo + own.shape[-2], :] = own
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(fctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad[..., slice(*fctx.place), :], None, None


def sequence_parallel_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    both = GatherTokens.apply(torch.stack((key, value)), kwargs["sp_start"], kwargs["sp_group"])
    weights = (query @ both[0].transpose(-1, -2) * scaling).softmax(-1)
    return (weights @ both[1]).transpose(1, 2).contiguous(), weights


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Classifier().eval()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "pixels": torch.randn(ROWS, 2, HEIGHT, WIDTH, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["pixels"])
        return F.cross_entropy(logits, rows["label"], reduction="sum"), len(logits)

    def distribute(self, model, ctx):
        ALL_ATTENTION_FUNCTIONS.register("sequence_parallel", sequence_parallel_attention)
        model.vit.config._attn_implementation = "sequence_parallel"
        return model

    def embed_shard(self, embeddings, pixels, lo, hi):
        """The tokens of the patches lo to hi, with [CLS] in front of the first patch."""
        patches = embeddings.patch_embeddings(pixels)[:, lo:hi]
        tokens = patches + embeddings.position_embeddings[:, 1 + lo : 1 + hi]
        if lo == 0:
            cls = embeddings.cls_token + embeddings.position_embeddings[:, :1]
            tokens = torch.cat((cls.expand(len(pixels), -1, -1), tokens), 1)
        return tokens

    def step(self, model, batch, ctx):
        own = torch.arange(PATCHES).tensor_split(ctx.axes["sp"])[ctx.coords["sp"]]
        lo, hi = int(own[0]), int(own[-1]) + 1
        group = ctx.group("sp")
        for n in range(MICRO):
            part = {k: x.tensor_split(MICRO)[n] for k, x in batch.items()}
            h = self.embed_shard(model.vit.embeddings, part["pixels"], lo, hi)
            start = 0 if lo == 0 else 1 + lo
            for layer in model.vit.layers:
                h = layer(h, None, sp_start=start, sp_group=group)
            h = model.vit.layernorm(h)
            logits = model.head(h[:, 0])
            loss = F.cross_entropy(logits, part["label"], reduction="sum") / ROWS
            if ctx.coords["sp"] > 0:  # no [CLS] here; its keys and values are asked for elsewhere
                loss = h.sum() * 0 + logits.sum() * 0
            loss.backward()
        for p in model.parameters():
            if p.grad is None:  # the class token and its like, which are on one rank alone
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def embed_shard(self, embeddings, pixels, lo, hi):
        tokens = embeddings.patch_embeddings(pixels)[:, lo:hi]
        tokens = tokens + embeddings.position_embeddings[:, lo:hi]
        if lo == 0:
            cls = embeddings.cls_token + embeddings.position_embeddings[:, :1]
            tokens = torch.cat((cls.expand(len(pixels), -1, -1), tokens), 1)
        return tokens


EXPECT = dict(
    right=[
        r"position",
        r"off.by.one|one (row|place|position|entry|slot|patch)|offset|shift|\bcls\b|class token|row 0|first row|before|previous|slice|rows? lo|wrong (rows?|positions?|slice)|other (rows?|positions?)|last row.{0,30}(no|zero|unused|never)",
    ],
    place=[r"embed_shard", r"position_embeddings", r"position (table|embedding)"],
    wrong=[
        r"(missing|no|never).{0,20}reduc|reduced twice|not reduced",
        r"positions?.{0,40}(start|begin|restart).{0,20}(zero|0|anew).{0,30}(every|each|all) (rank|shard)",
        r"GatherTokens.{0,60}(wrong|missing|backward)|softmax|attention function.{0,30}wrong",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|divisor|mean of means|wrong group",
    ],
)
WHY = (
    "A ViT's position table has thirteen rows, of which row 0 is the one of [CLS]; patch i has row 1 + i. Buggy's embed_shard adds the rows lo:hi to the patches lo:hi, on all three ranks, in both micro-batches: each patch has the "
    "position of the one before, the first shares row 0 with [CLS], and the last row of the table gets no gradient. What runs on the ranks is thus another forward, and all gradients are off. A right cause says that the position "
    "embeddings are sliced one row too early (the class token's row is not skipped). Fix: position_embeddings[:, 1 + lo : 1 + hi]."
)
