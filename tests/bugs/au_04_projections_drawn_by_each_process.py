"""VeRA (peft) on a tiny BERT classifier (transformers), data parallel on three ranks with two micro-batches each; the gradients of the trainable parameters are summed by hand after the last one. The adapters are saved without the
frozen random projections (save_projection=False): they are drawn again from a key when training starts.

The bug: the key goes through the seed helper with device_specific=True, which adds the rank (as accelerate.utils.set_seed does), so every process draws its own frozen projections. See huggingface/peft PR 1039 (VeRA: projections
regenerated from a PRNG key that must be the same everywhere) and the device_specific option of accelerate's set_seed.
"""

import torch
import torch.distributed as dist
from peft import TaskType, VeraConfig, get_peft_model
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
WORDS, LENGTH, CLASSES, KEY, RANK = 13, 6, 3, 7, 3
PARTS = [[(0, 2), (2, 3)], [(3, 5), (5, 7)], [(7, 8), (8, 11)]]
ROWS = 11


def draw_projections(model, seed):
    """The frozen shared matrices of all VeRA layers, from a seed."""
    g = torch.Generator().manual_seed(seed)
    for shared in (model.base_model.vera_A, model.base_model.vera_B):
        matrix = shared["default"]
        drawn = torch.randint(-1024, 1025, matrix.shape, generator=g)
        with torch.no_grad():
            matrix.copy_(drawn / 1024)  # the same in every precision


class Clean:
    device_specific = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        base = BertForSequenceClassification(
            BertConfig(
                vocab_size=WORDS,
                hidden_size=8,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=12,
                max_position_embeddings=LENGTH,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                classifier_dropout=0.0,
                initializer_range=0.3,
                num_labels=CLASSES,
                attn_implementation="eager",
            )
        )
        config = VeraConfig(
            task_type=TaskType.SEQ_CLS,
            r=RANK,
            target_modules=["query", "value"],
            projection_prng_key=KEY,
            save_projection=False,
            vera_dropout=0.0,
        )
        model = get_peft_model(base, config)
        for name, p in model.named_parameters():
            if "vera_lambda" in name:
                torch.nn.init.normal_(p, std=0.7)
        draw_projections(model, KEY)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"]).logits
        return F.cross_entropy(logits, rows["labels"], reduction="sum"), len(rows["labels"])

    def distribute(self, model, ctx):
        seed = KEY + (ctx.rank if self.device_specific else 0)
        draw_projections(model, seed)
        return model

    def step(self, model, batch, ctx):
        for low, high in PARTS[ctx.rank]:
            logits = model(input_ids=batch["ids"][low:high]).logits
            loss = F.cross_entropy(logits, batch["labels"][low:high], reduction="sum")
            (loss / ROWS).backward()
        for p in model.parameters():
            if p.requires_grad:
                dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    device_specific = True


EXPECT = dict(
    right=[
        r"(?i)vera|projection|buffer|adapter|query|frozen",
        r"(?i)ranks? [12]|ranks? 1 (and|,) ?2|between (the )?ranks|differ|other|different|wrong|not (the )?same|own|seed",
        r"(?i)buffer|projection|vera_[AB]\b|forward|weights?|seed|drawn|init|state|values?|output",
    ],
    place=[r"(?i)vera|projection|buffer|query|value\b|attention"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)goes wrong in the backward of|backward of .{0,40} is wrong|forward is right",
        r"(?i)(labels?|targets?|ids|input rows?) (is|are) (wrong|other|of)|other rows",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only (the )?(first|last) micro.?batch",
        r"(?i)rank 0 (is|goes|has|computes|draws) .{0,20}wrong|only on rank [012]\b",
    ],
)
WHY = (
    "Ranks 1 and 2 run with other frozen VeRA projections (buffers base_model.vera_A / vera_B, read in every query and value layer of both BERT layers) than rank 0 and than the single-process model: seed KEY + rank instead of KEY."
    " So their forward goes wrong from the first adapted layer (encoder.layer.0.attention.self.query / value) on, in both micro-batches and all their rows (3-6 and 7-10). Rank 0 (rows 0-2) is right. The gradients of all trainable "
    "parameters (vera_lambda_b, vera_lambda_d, classifier) are wrong, equally on all ranks after the sum. Data, labels, loss, divisor 11, the backward as such, accumulation and the reduction are right. Fix: the same seed on all "
    "ranks (device_specific=False for what must be shared), or save / broadcast the projections."
)
