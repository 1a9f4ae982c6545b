"""One Llama of transformers with two LoRA adapters of peft, one per objective; every row goes through both. Layers are checkpointed
(non-reentrant), gradients summed by hand over three ranks. After peft's reports on gradient checkpointing with several adapters:
set_adapter in the forward, and which adapter is the active one when the backward recomputes.
"""

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCABULARY, ADAPTERS = 10, 7, 37, ("style", "fact")


def switch(model, name):
    model.set_adapter(name)
    for key, param in model.named_parameters():  # set_adapter freezes the other one
        if "lora_" in key:
            param.requires_grad_(True)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = LlamaConfig(
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, hidden_size=16, intermediate_size=22,
            vocab_size=VOCABULARY, max_position_embeddings=LENGTH, initializer_range=0.2, use_cache=False,
        )  # fmt: skip
        lora = LoraConfig(
            r=3,
            lora_alpha=6,
            lora_dropout=0.0,
            target_modules=["q_proj", "v_proj", "down_proj"],
            init_lora_weights=False,
        )
        model = get_peft_model(LlamaForCausalLM(config), lora, adapter_name="style")
        model.add_adapter("fact", lora)
        switch(model, "style")
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        found = {"ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g)}
        for name in ADAPTERS:
            labels = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g)
            found[name] = labels.masked_fill(torch.rand(ROWS, LENGTH, generator=g) < 0.3, -100)
        return found

    def objective(self, model, rows, name):
        switch(model, name)
        logits = model(input_ids=rows["ids"]).logits
        return F.cross_entropy(logits.flatten(0, 1), rows[name].flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        loss = sum(self.objective(model, rows, name) for name in ADAPTERS)
        return loss, sum((rows[name] != -100).sum() for name in ADAPTERS)

    def distribute(self, model, ctx):
        model.train()
        model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def backward(self, model, rows, count):
        for name in ADAPTERS:
            (self.objective(model, rows, name) / count).backward()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = sum((mine[name] != -100).sum() for name in ADAPTERS)
        dist.all_reduce(count)
        self.backward(model, mine, count)
        for param in model.parameters():
            if param.requires_grad:
                dist.all_reduce(param.grad)


class Buggy(Clean):
    def backward(self, model, rows, count):
        loss = sum(self.objective(model, rows, name) for name in ADAPTERS)
        (loss / count).backward()


EXPECT = dict(
    right=[
        r"recomput|computed? again|checkpoint|second forward|forward .{0,30}(again|repeated)",
        r"adapter|lora|style|fact|other (weights|state|parameters|values)|something else|self_attn|mlp|layers?\.",
    ],
    place=[r"layers?\.\d|lora_|style|self_attn|[qv]_proj|down_proj|mlp|checkpoint"],
    wrong=[
        r"(is|are|was|were) (never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"(own|local) (count|denominator|divisor)",
        r"do(es)? not read every row once|rows? .{0,20}(never|twice) read",
        r"fact\S* (is|are|has|have) (a )?wrong",
        r"random (numbers|state)|dropout|\brng\b",
        r"(first|original) forward (is|goes|was) wrong",
    ],
)
WHY = (
    "Both forwards run before the one backward, and set_adapter('fact') has been called last. When the backward reaches the checkpointed layers of the first "
    "forward, they are recomputed with 'fact' active instead of 'style': the saved activations and the weights of A and B that the backward of style uses are those of fact. "
    "The gradients of all lora parameters of 'style', in both layers, are wrong on every rank; those of 'fact' are right, and so are both forwards, losses, divisor and the reduction. "
    "Right: backward of one objective before the adapter is switched (or a context that restores it in the recomputation)."
)
