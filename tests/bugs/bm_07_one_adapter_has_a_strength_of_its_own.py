"""LoRA on a tiny vision transformer (transformers' ViTForImageClassification in peft, adapters on the query and value projections, classifier saved with them) under DDP on two ranks, seven images (4 and 3) in two
micro-batches. The value projection of the second layer has an alpha of its own by alpha_pattern. For speed, the step's copy of the model runs the adapted layers by a fused forward of its own, with the
scale folded into the smaller product.

The bug: the fused forward takes its scale from the configuration's lora_alpha and r for all layers, so that alpha_pattern is ignored. After reports on fused or served LoRA layers (Unsloth, vLLM and merge
scripts) that read alpha and rank from the head of adapter_config.json and not the patterns.
"""

import contextlib

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import ViTConfig, ViTForImageClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, LABELS, ALPHA, RANK, OWN_ALPHA = 7, 3, 4, 2, 9


class FusedLora(LoraLinear):
    """The frozen layer and its adapter with one scaled small product."""

    fused_scale = 1.0

    def forward(self, x, *args, **kwargs):
        small = F.linear(x, self.lora_A["default"].weight) * self.fused_scale
        return self.base_layer(x) + F.linear(small, self.lora_B["default"].weight)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        vit = ViTForImageClassification(
            ViTConfig(
                hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=10, image_size=8, patch_size=4, num_channels=2, num_labels=LABELS,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.3,
            )
        )  # fmt: skip
        config = LoraConfig(
            r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"], alpha_pattern={"layers.1.attention.v_proj": OWN_ALPHA}, init_lora_weights=False,
        )  # fmt: skip
        return get_peft_model(vit, config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "pixel_values": torch.randn(ROWS, 2, 8, 8, generator=g),
            "labels": torch.randint(LABELS, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(pixel_values=rows["pixel_values"]).logits
        return F.cross_entropy(logits, rows["labels"], reduction="sum"), len(rows["labels"])

    def scale_of(self, layer, config):
        return layer.scaling["default"]

    def distribute(self, model, ctx):
        config = model.peft_config["default"]
        for layer in model.modules():
            if isinstance(layer, LoraLinear):
                layer.__class__ = FusedLora
                layer.fused_scale = self.scale_of(layer, config)
        return DDP(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        model.zero_grad()
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            with model.no_sync() if n == 0 else contextlib.nullcontext():
                loss, _ = self.loss_sum(model, part)
                (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    def scale_of(self, layer, config):
        return config.lora_alpha / config.r


EXPECT = dict(
    right=[
        r"v_proj|lora|adapter|FusedLora|scal(e|ing)|alpha|layers?\.1",
        r"forward|scal(e|ing)|alpha|factor|output|computes|value|too (small|weak)|differ",
    ],
    place=[
        r"layers?\.1\.attention(\.attention)?\.v_proj",
        r"v_proj",
        r"FusedLora",
        r"fused_scale|scale_of",
        r"alpha_pattern|scaling",
    ],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"(layers?\.0\.\S*|q_proj|classifier)\S* (computes|is) wrong in the forward|(wrong|other) rows",
    ],
)
WHY = (
    "Buggy.scale_of gives every fused layer the configuration's 4 / 2 = 2; the value projection of layers.1 has alpha 9 by alpha_pattern, so its scaling is 9 / 2 = 4.5, and its adapter acts with 4/9 of its strength. Its output is wrong on both ranks and in "
    "both micro-batches, and so are logits, loss and all gradients: those of its own lora_A and lora_B have the missing factor 4/9 besides the changed incoming gradient; the adapters of layers.0 and the query of layers.1 and the classifier are wrong only by what "
    "goes through the wrong forward. All other adapted layers compute right; DDP, no_sync and the factor 2 / 7 are right. Fix: take the scale from layer.scaling, which knows the patterns."
)
