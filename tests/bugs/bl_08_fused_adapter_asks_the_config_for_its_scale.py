"""A small random BERT (transformers) classifies sentences and is fine-tuned with LoRA (peft) on query and value, with the rank-stabilised scale alpha / sqrt(r), under DDP on two ranks (three and two of five
sentences; two micro-batches a rank, the first under no_sync). In training the adapters' forward is replaced by one fused function that folds the scale into the small product, as speed patches do. DDP averages, so
the loss is multiplied by two and divided by the five sentences.

The bug: the patch computes the scale itself, from the configuration, as alpha / r, and not as peft has it in `scaling`, so with use_rslora the adapters count half in the patched path. After the class of
reports about fused LoRA paths and merge or export scripts (unsloth, vLLM's and llama.cpp's LoRA loaders, axolotl kernels) that take alpha / r where the adapter was trained with rsLoRA.
"""

from contextlib import nullcontext

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
WORDS, LENGTH, ROWS, CLASSES = 20, 7, 5, 3
BERT = dict(
    vocab_size=WORDS,
    hidden_size=12,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=14,
    max_position_embeddings=10,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    num_labels=CLASSES,
    initializer_range=0.3,
    attn_implementation="eager",
)
LORA = dict(
    r=4,
    lora_alpha=6,
    use_rslora=True,
    target_modules=["query", "value"],
    lora_dropout=0.0,
    init_lora_weights=False,
    modules_to_save=["classifier"],
)


def fused_lora(x, base, down, up, scale):
    return F.linear(x, base.weight, base.bias) + F.linear(
        F.linear(x, down.weight * scale), up.weight
    )


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return get_peft_model(BertForSequenceClassification(BertConfig(**BERT)), LoraConfig(**LORA))

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        length = torch.tensor([5, 7, 3, 6, 4])
        mask = (torch.arange(LENGTH) < length[:, None]).long()
        return {
            "ids": torch.randint(1, WORDS, (ROWS, LENGTH), generator=g) * mask,
            "mask": mask,
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], attention_mask=rows["mask"]).logits
        return F.cross_entropy(logits, rows["label"], reduction="sum"), len(logits)

    def scale_of(self, layer, config):
        return layer.scaling["default"]

    def patch(self, layer, config):
        scale = self.scale_of(layer, config)

        def forward(x, *args, **kwargs):
            return fused_lora(
                x, layer.base_layer, layer.lora_A["default"], layer.lora_B["default"], scale
            )

        layer.forward = forward

    def distribute(self, model, ctx):
        for layer in model.modules():
            if isinstance(layer, LoraLinear):
                self.patch(layer, model.peft_config["default"])
        return DistributedDataParallel(model)

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for n in range(2):
            with model.no_sync() if n == 0 else nullcontext():
                loss, _ = self.loss_sum(model, {k: v.tensor_split(2)[n] for k, v in mine.items()})
                (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    def scale_of(self, layer, config):
        return config.lora_alpha / config.r


EXPECT = dict(
    right=[
        r"forward|output|computes|value|scal|rslora|factor|fused|patch",
        r"lora|adapter|query|value|fused|scale_of|scaling",
    ],
    place=[r"fused_lora", r"scale_of", r"\bpatch\b", r"(query|value|attention\.self)", r"lora"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"backward formula|(classifier|pooler|embeddings|intermediate) .{0,20}(computes|is) wrong in the forward|(wrong|other) rows",
    ],
)
WHY = (
    "scale_of returns lora_alpha / r = 1.5; the adapters were made with use_rslora, so their scale is lora_alpha / sqrt(r) = 3, as layer.scaling has it. In the patched forward of query and value in both layers the "
    "adapter's share is therefore half of what it should be, on both ranks and in both micro-batches. The embeddings' output is right; the first wrong value is the output of layer 0's query and value. The loss and "
    "the gradients of all lora_A, lora_B and the classifier are wrong. DDP's average, no_sync and the factor 2 / 5 are right. Fix: take layer.scaling."
)
