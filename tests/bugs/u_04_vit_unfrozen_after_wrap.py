"""Gradual unfreezing of a ViT of transformers under DDP: at first only the upper layer and the classifier train, in the second phase all of it.
The step is one of the second phase. After the reports on requires_grad that is switched on behind DDP's back.
"""

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import ViTConfig, ViTForImageClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, SIZE, CLASSES = 8, 8, 5


def lower(name):
    return "embeddings" in name or ".layers.0." in name or ".layer.0." in name


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = ViTConfig(
            hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, image_size=SIZE,
            patch_size=4, num_channels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            num_labels=CLASSES, initializer_range=0.2,
        )  # fmt: skip
        return ViTForImageClassification(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(ROWS, 3, SIZE, SIZE, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(pixel_values=rows["image"]).logits
        return F.cross_entropy(logits, rows["label"], reduction="sum"), len(logits)

    def frozen(self, model, yes):
        for name, p in model.named_parameters():
            if lower(name):
                p.requires_grad_(not yes)

    def distribute(self, model, ctx):
        self.frozen(model, True)
        first = DistributedDataParallel(model)  # phase one trains with it
        self.frozen(model, False)
        return self.second_phase(first)

    def second_phase(self, ddp):
        return DistributedDataParallel(ddp.module)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss * ctx.world_size / len(batch["label"])).backward()


class Buggy(Clean):
    def second_phase(self, ddp):
        return ddp


EXPECT = dict(
    right=[
        r"reduc|synchron|own (rows|gradient|part)|(its|their) (own )?rank|local|communicat",
        r"never|not|missing|only|own|lack|without|no collective|left out|stays",
    ],
    place=[r"embeddings|layers?\.0|patch|cls_token|position_emb"],
    wrong=[
        r"forward (is wrong|goes wrong)|goes wrong in",
        r"(layers?\.1|classifier|vit\.layernorm)\S* (is|are) (wrong|not reduced|never)",
        r"(counted|reduced|summed|added) (twice|again)",
        r"(own|local) (count|denominator|divisor)",
        r"zeros? into|all parameters|every parameter is wrong",
        r"backward of .{0,30}(is|goes) wrong",
    ],
)
WHY = (
    "DDP was made while embeddings and layer 0 were frozen, so its reducer knows only layer 1, the last layernorm and the classifier. They were unfrozen behind it and DDP was not "
    "made again: the gradients of the embeddings (cls_token, position_embeddings, patch projection) and of layer 0 are never reduced; each of the three ranks keeps that of its own "
    "3, 3 or 2 rows, times 3, because the loss is multiplied by the ranks for DDP's average. What DDP knows is right, and so are forward, loss and backward. The model must be wrapped again after unfreezing."
)
