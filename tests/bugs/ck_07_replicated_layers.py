"""transformers' BERT with peft LoRA and layer_replication (base layers 0, 1, 1, 2: the two
copies share their frozen weights, each has its own adapters), data parallel over three ranks
(3, 3, 2 of 8 rows) without a wrapper: the trainer collects the adapters once and reduces their
gradients.

Bug: the trainer collects them in a dict by the identity of the wrapped base weight, to meet
tied projections once. Replicated layers have one base weight and two adapters. After
adapter-only trainers whose collection de-duplicates by base layer, and peft's memory-efficient
layer replication.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import BertConfig, BertForTokenClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
VOCAB, LENGTH, ROWS, TAGS = 17, 7, 8, 3


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 71)
        config = BertConfig(
            vocab_size=VOCAB,
            hidden_size=9,
            intermediate_size=11,
            num_hidden_layers=3,
            num_attention_heads=3,
            max_position_embeddings=LENGTH,
            num_labels=TAGS,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.25,
        )
        lora = LoraConfig(
            r=2,
            lora_alpha=3,
            lora_dropout=0.0,
            target_modules=["query", "value"],
            layer_replication=[[0, 2], [1, 3]],
        )
        model = get_peft_model(BertForTokenClassification(config), lora)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(p, std=0.3)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 710)
        ids = torch.randint(1, VOCAB, (ROWS, LENGTH), generator=g)
        length = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g)
        seen = torch.arange(LENGTH) < length
        tags = torch.randint(0, TAGS, (ROWS, LENGTH), generator=g)
        return {"ids": ids * seen, "seen": seen.long(), "tags": tags.masked_fill(~seen, -100)}

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], attention_mask=rows["seen"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows["tags"].flatten(), reduction="sum")
        return loss, int((rows["tags"] >= 0).sum())

    def adapters(self, model):
        return [module for module in model.modules() if isinstance(module, LoraLayer)]

    def distribute(self, model, ctx):
        self.collected = self.adapters(model)
        return model

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        total = int((batch["tags"] >= 0).sum())
        own = torch.arange(ROWS).tensor_split(dist.get_world_size(group))[dist.get_rank(group)]
        for part in own.split(2):
            loss, _ = self.loss_sum(model, {k: v[part] for k, v in batch.items()})
            (loss / total).backward()
        for module in self.collected:
            for p in module.parameters():
                if p.requires_grad:
                    dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def adapters(self, model):
        found = {}
        for module in model.modules():
            if isinstance(module, LoraLayer):
                found[id(module.get_base_layer().weight)] = module
        return list(found.values())


EXPECT = dict(
    right=[
        r"lora|adapter",
        (
            r"replicat|layer\.?\s?1\b|layers?\.1|second layer|shared? (base|weight|frozen)"
            r"|same (base|weight)|base.?(layer|weight)|duplicat|de-?dup|\bid\("
        ),
        (
            r"(not|never|miss|without|skip|only|n't|left out|lack|omit|lost|drop"
            r"|overwr).{0,60}(reduc|sum|sync|collect|found|dict)|(reduc|sum|sync|collect"
            r"|found|dict)\w*.{0,60}(not|never|miss|skip|n't|omit|lost|drop|overwr|only)"
            r"|unreduced|local gradient|own rows"
        ),
    ],
    place=[
        r"\badapters\b",
        r"\bfound\b",
        r"get_base_layer",
        r"layer\.1\.",
        r"collected",
        r"layer_replication",
    ],
    wrong=[
        r"twice|double",
        r"(token|tag) count.{0,40}(local|own)",
        r"lora_?alpha|scaling",
        r"padding.{0,40}attend",
        r"classifier.{0,40}(not reduced|missing)",
    ],
)
WHY = (
    "With layer_replication, layers 1 and 2 share base weights but have adapters of their "
    "own. Buggy.adapters collects LoRA modules in a dict by id of the base weight, so the "
    "second copy replaces the first and the first copy's adapters are never all-reduced. "
    "Wrong are the gradients of lora_A and lora_B (query, value) of encoder layer 1: each "
    "rank keeps those of its own rows; all others are right. A right cause says that layer "
    "1's adapters are not reduced over dp, as they are de-duplicated with the replica that "
    "shares their base weight. Fix: collect the modules in a list."
)
