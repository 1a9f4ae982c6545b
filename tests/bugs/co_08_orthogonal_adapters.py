"""transformers' ViT classifier with peft's AdaLoRA on queries and values (delta = B diag(E) A),
DistributedDataParallel over two ranks (4 and 3 of 7 images), two micro-batches each, the first
under no_sync. peft adds a term to the loss that keeps A and B orthogonal: the Frobenius norm of
A A^T - I and B^T B - I, averaged over the matrices, times orth_reg_weight.

The step takes logits from the model, sums the cross-entropy itself, and adds the term in proportion
to the rows of the micro-batch.

Bug: the step's own term takes squared norms, as the paper of AdaLoRA writes it; peft uses the norm.
After training loops that rebuild the regulariser of peft because they need a summed loss.
"""

import contextlib

import torch
import torch.nn.functional as F
from peft import AdaLoraConfig, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import ViTConfig, ViTForImageClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
IMAGES, SIDE, CLASSES, WEIGHT = 7, 6, 5, 0.4


def off_identity(p, name):
    square = p @ p.t() if "lora_A" in name else p.t() @ p
    return square - torch.eye(square.shape[0], dtype=p.dtype)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 8)
        config = ViTConfig(
            image_size=SIDE,
            patch_size=2,
            num_channels=2,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=9,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.3,
        )
        adapter = AdaLoraConfig(
            init_r=3,
            target_r=2,
            total_step=100,
            lora_alpha=5,
            lora_dropout=0.0,
            orth_reg_weight=WEIGHT,
            target_modules=["q_proj", "v_proj"],
        )
        model = get_peft_model(ViTForImageClassification(config), adapter)
        for name, p in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(p, std=0.5)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 80)
        return {
            "image": torch.randn(IMAGES, 2, SIDE, SIDE, generator=g),
            "label": torch.randint(0, CLASSES, (IMAGES,), generator=g),
        }

    def loss_sum(self, model, rows):
        n = rows["label"].shape[0]
        # AdaLoraModel.forward adds the term; PeftModel without a task type would go past it
        return model.base_model(pixel_values=rows["image"], labels=rows["label"]).loss * n, n

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def orthogonality(self, model):
        terms = [
            torch.linalg.matrix_norm(off_identity(p, name))
            for name, p in model.named_parameters()
            if "lora_A" in name or "lora_B" in name
        ]
        return WEIGHT * sum(terms) / len(terms)

    def step(self, model, batch, ctx):
        dp = ctx.axes["dp"]
        parts = torch.arange(IMAGES).tensor_split(dp)[ctx.coords["dp"]].tensor_split(2)
        for i, rows in enumerate(parts):
            with contextlib.nullcontext() if i == len(parts) - 1 else model.no_sync():
                logits = model(pixel_values=batch["image"][rows]).logits
                loss = F.cross_entropy(logits, batch["label"][rows], reduction="sum")
                loss = loss + rows.numel() * self.orthogonality(model)
                (loss * dp / IMAGES).backward()


class Buggy(Clean):
    def orthogonality(self, model):
        terms = [
            off_identity(p, name).square().sum()
            for name, p in model.named_parameters()
            if "lora_A" in name or "lora_B" in name
        ]
        return WEIGHT * sum(terms) / len(terms)


EXPECT = dict(
    right=[
        r"orthogonal|regulari[sz]|orth_reg|off_identity|auxiliary|penalty",
        r"squar|norm\b|frobenius|sqrt|root|differ|not the same|other (function|form)|"
        r"should (be|use)|instead|power",
    ],
    place=[r"orthogonality", r"off_identity", r"lora_[AB]", r"orth_reg", r"\.square\(\)\.sum\(\)"],
    wrong=[
        r"(penalty|regulari[sz]\w*|orthogonal\w*).{0,50}(twice|every rank|each rank|each micro|"
        r"every micro|number of ranks|missing|left out|not added)",
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"no_sync.{0,40}(wrong|missing|last)",
        r"uneven.{0,40}(rows|images)",
        r"(scaling|ranknum|lora_alpha).{0,30}(wrong|missing)",
        r"lora_E.{0,30}(wrong|missing)",
    ],
)
WHY = """peft's AdaLoraModel.forward adds orth_reg_weight times the mean of torch.norm(cov - I,
p="fro") over all lora_A and lora_B. Buggy.orthogonality takes the sum of squares without the root,
so that each matrix's gradient of this term is 2 * norm times what it should be. lora_A and lora_B
are wrong; lora_E (not in the term) is right, as are cross-entropy, weights and reduction. A right
cause says that the regulariser of the step differs from the objective's (squared, no root).
Fix: the norm."""
