"""A transformers ViT classifier with a peft LoKr adapter (delta = w1 (x) w2, a Kronecker product),
trained by DDP over two ranks (3 and 2 of 5 images), two micro-batches, synchronised in the second.
On the ranks the adapted layers do not build the Kronecker product: the input is folded into a
matrix and multiplied by the two small factors.

Bug: the fold takes the input for (width of w2, width of w1) where the Kronecker product wants w1's
index to be the slow one. All shapes fit. After "bypass" forwards of LyCORIS-like adapters that
disagree with the merged weight.
"""

import torch
import torch.nn.functional as F
from peft import LoKrConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import ViTConfig, ViTForImageClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
IMAGES, SIDE, CLASSES = 5, 6, 3


def kronecker_linear(x, first, second):
    """x @ kron(first, second).T, without the product."""
    x = x.unflatten(-1, (first.shape[1], second.shape[1]))
    x = F.linear(x, second).transpose(-1, -2)
    return F.linear(x, first).transpose(-1, -2).flatten(-2)


def folded_linear(x, first, second):
    """x @ kron(first, second).T, without the product."""
    x = x.unflatten(-1, (second.shape[1], first.shape[1]))
    x = F.linear(x, first).transpose(-1, -2)
    return F.linear(x, second).flatten(-2)


class Clean:
    product = staticmethod(kronecker_linear)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 31)
        config = ViTConfig(
            hidden_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=10,
            image_size=SIDE,
            patch_size=3,
            num_channels=2,
            num_labels=CLASSES,
            initializer_range=0.3,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="eager",
        )
        adapter = LoKrConfig(
            r=6,
            alpha=9,
            target_modules=["fc1", "fc2", "q_proj", "o_proj"],
            modules_to_save=["classifier"],
            init_weights=False,
        )
        return get_peft_model(ViTForImageClassification(config), adapter)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 310)
        return {
            "image": torch.randn(IMAGES, 2, SIDE, SIDE, generator=g),
            "label": torch.randint(CLASSES, (IMAGES,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(pixel_values=rows["image"]).logits
        return F.cross_entropy(logits, rows["label"], reduction="sum"), rows["label"].shape[0]

    def faster(self, layer):
        def delta(name, x, *args, **kwargs):
            first, second = layer.lokr_w1[name], layer.lokr_w2[name]
            return self.product(x, first, second) * layer.scaling[name]

        layer._get_delta_activations = delta

    def distribute(self, model, ctx):
        for module in model.modules():
            if hasattr(module, "lokr_w1"):
                self.faster(module)
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        ranks = ctx.axes["dp"]
        own = torch.arange(IMAGES).tensor_split(ranks)[ctx.coords["dp"]]
        for i, rows in enumerate(own.tensor_split(2)):
            model.require_backward_grad_sync = i == 1
            part = {k: v[rows] for k, v in batch.items()}
            loss, _ = self.loss_sum(model, part)
            (loss * ranks / IMAGES).backward()


class Buggy(Clean):
    product = staticmethod(folded_linear)


EXPECT = dict(
    right=[
        r"kron|lokr|factor|adapter|delta|folded_linear",
        r"order|fold|unflatten|reshap|view|layout|transpos|swap|exchang|interleav|stride|slow|"
        r"index|axis|axes|shape",
    ],
    place=[
        r"folded_linear",
        r"lokr_w[12]",
        r"_get_delta_activations|\bdelta\b|\bproduct\b|\bfaster\b",
        r"unflatten",
    ],
    wrong=[
        r"scaling.{0,30}(missing|twice|wrong|left out)",
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"(no_sync|require_backward_grad_sync).{0,40}(wrong|early|late)",
        r"uneven.{0,40}(images|rows)",
        r"dropout.{0,30}(differ|random|active|wrong)",
    ],
)
WHY = """kron(w1, w2) maps index (j, l) = j * width(w2) + l, so the input must be unflattened to
(width of w1, width of w2). folded_linear unflattens to (width of w2, width of w1): it applies
kron(w2, w1)-like columns, a permuted input (the output is flattened in the right order). The
adapter's delta is wrong, so logits and all gradients are. A right cause says that the Kronecker
factors are applied in the wrong order / the input is folded wrongly. Fix: as kronecker_linear."""
