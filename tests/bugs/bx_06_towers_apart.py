"""transformers' CLIPModel with its towers apart: on each of two data parallel replicas one rank runs the image tower and another the text tower; the features of a micro-batch are exchanged and both ranks compute the same loss from
them (each row: one picture, three captions, which one fits). Every rank holds the whole model; afterwards gradients are summed, the towers' and projections' over both ranks of a replica, as the other one has none.
Two micro-batches.

The bug: all parameters are summed over the tower axis, logit_scale too, whose gradient is computed by both ranks (the loss is replicated): it counts twice. After reports on temperatures in modality-parallel CLIP training
(DistCLIP-like forks; Megatron multimodal: 'parameters used after the exchange must not be summed over it').
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tower": 2}}}}
ROWS, CAPTIONS, WORDS, VOCABULARY, CODE = 7, 3, 5, 19, 6


class Exchange(torch.autograd.Function):
    """One tower's features for both ranks; each computes the same from them, so the gradient stays as it is."""

    @staticmethod
    def forward(fctx, features, source, group):
        features = features.clone()
        dist.broadcast(features, src=source, group=group)
        return features

    @staticmethod
    def backward(fctx, grad):
        return grad, None, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        small = dict(
            hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2
        )
        return CLIPModel(
            CLIPConfig(
                text_config=dict(
                    small,
                    vocab_size=VOCABULARY,
                    max_position_embeddings=WORDS,
                    eos_token_id=VOCABULARY - 1,
                    bos_token_id=0,
                    pad_token_id=1,
                    initializer_range=0.3,
                ),
                vision_config=dict(small, image_size=6, patch_size=3, initializer_range=0.3),
                projection_dim=CODE,
                logit_scale_init_value=1.2,
                attn_implementation="eager",
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(2, VOCABULARY - 1, (ROWS, CAPTIONS, WORDS), generator=g)
        ids[..., -1] = VOCABULARY - 1
        return {
            "pixel_values": torch.randn(ROWS, 3, 6, 6, generator=g),
            "input_ids": ids,
            "labels": torch.randint(CAPTIONS, (ROWS,), generator=g),
        }

    def image_features(self, model, rows):
        pooled = model.vision_model(pixel_values=rows["pixel_values"]).pooler_output
        return model.visual_projection(pooled)

    def text_features(self, model, rows):
        pooled = model.text_model(input_ids=rows["input_ids"].flatten(0, 1)).pooler_output
        return model.text_projection(pooled).unflatten(0, (-1, CAPTIONS))

    def contrast(self, model, image, text, labels):
        image, text = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
        logits = model.logit_scale.exp() * (text @ image[..., None]).squeeze(-1)
        return F.cross_entropy(logits, labels, reduction="sum")

    def loss_sum(self, model, rows):
        image, text = self.image_features(model, rows), self.text_features(model, rows)
        return self.contrast(model, image, text, rows["labels"]), len(rows["labels"])

    def tower_loss(self, model, rows, ctx):
        group, n = ctx.group("tower"), len(rows["labels"])
        vision, language = dist.get_process_group_ranks(group)
        dtype = model.logit_scale.dtype
        image = torch.zeros(n, CODE, dtype=dtype)
        text = torch.zeros(n, CAPTIONS, CODE, dtype=dtype)
        if ctx.rank == vision:
            image = self.image_features(model, rows)
        else:
            text = self.text_features(model, rows)
        image = Exchange.apply(image, vision, group)
        text = Exchange.apply(text, language, group)
        return self.contrast(model, image, text, rows["labels"])

    def reduce_gradients(self, model, ctx):
        for name, p in model.named_parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            # the temperature is used behind the exchange: both ranks of a replica have all of its gradient
            axes = ("dp",) if name == "logit_scale" else ("dp", "tower")
            dist.all_reduce(p.grad, group=ctx.group(*axes))

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: x.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, x in batch.items()}
        for i in range(2):
            rows = {k: x.tensor_split(2)[i] for k, x in mine.items()}
            (self.tower_loss(model, rows, ctx) / ROWS).backward()
        self.reduce_gradients(model, ctx)


class Buggy(Clean):
    def reduce_gradients(self, model, ctx):
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=ctx.group("dp", "tower"))


EXPECT = dict(
    right=[
        r"logit_scale",
        r"twice|two times|2 times|double|replicat|both ranks|2 ?x|x ?2|factor (of )?2|times too|too (large|big|much)|\b2(\.0+)?\b",
    ],
    place=[r"reduce_gradients", r"all.?reduce", r"tower", r"logit_scale"],
    wrong=[
        r"micro.?batch(es)? .{0,30}(lost|dropped|overwritten|twice|again)",
        r"not reduced|never reduced|missing (all.?)?reduc",
        r"(vision|text)_model.{0,40}(wrong|twice|double)|read the same rows",
        r"Exchange.{0,40}(wrong|missing)|mean of means|token count",
    ],
)
WHY = (
    "The two ranks of a replica compute the same loss from the exchanged features, each has the whole gradient of logit_scale for its replica's rows; the sum over dp and tower (4 ranks) has it twice: exactly 2 times the right one on all four ranks. "
    "All other parameters have a gradient on one rank of a replica only and are right. A right cause says that logit_scale's gradient is replicated over the tower axis and nevertheless summed there (factor 2). "
    "Fix: reduce it over dp only, or divide by the tower axis' size."
)
