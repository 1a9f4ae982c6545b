"""peft's LoRA (with adapter biases) on transformers' Qwen2, fine-tuned with two terms: the
cross-entropy of the words and a divergence from the model without adapter. Data parallel over two
ranks (3 and 2 of 5 rows of unlike length), micro-batches of two.

All micro-batches of the first term come first; their gradient is set aside, as the log shows the
norm of each term by itself; then those of the second term, and both are added.

Bug: the tensors are set aside without a copy, and zero_grad(set_to_none=False) empties them. The
second term goes into the same tensors, which are then added to themselves. After loops that
kept `[p.grad for p in ..]` and met a zero_grad that works in place.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
WORDS, ROWS, T, PULL = 16, 5, 7, 0.8


class Clean:
    def __init__(self, seed=0):
        self.seed, self.norms = seed, {}

    def build(self):
        torch.manual_seed(self.seed + 101)
        config = Qwen2Config(
            vocab_size=WORDS,
            hidden_size=8,
            intermediate_size=11,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
            initializer_range=0.4,
            use_cache=False,
        )
        lora = LoraConfig(
            r=3,
            lora_alpha=5,
            lora_dropout=0.0,
            lora_bias=True,
            target_modules=["q_proj", "v_proj"],
            init_lora_weights=False,
        )
        return get_peft_model(Qwen2ForCausalLM(config), lora)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1010)
        ids = torch.randint(WORDS, (ROWS, T + 1), generator=g)
        length = torch.randint(3, T + 1, (ROWS, 1), generator=g)
        labels = ids[:, 1:].masked_fill(torch.arange(T) >= length, -100)
        return {"ids": ids[:, :-1], "labels": labels}

    def words(self, model, rows):
        logits = model(input_ids=rows["ids"]).logits.transpose(1, 2)
        return F.cross_entropy(logits, rows["labels"], reduction="sum")

    def pull(self, model, rows):
        with torch.no_grad(), model.disable_adapter():
            base = model(input_ids=rows["ids"]).logits.log_softmax(-1)
        log_probs = model(input_ids=rows["ids"]).logits.log_softmax(-1)
        each = (log_probs.exp() * (log_probs - base)).sum(-1)
        return PULL * (each * rows["labels"].ne(-100)).sum()

    def loss_sum(self, model, rows):
        count = rows["labels"].ne(-100).sum().item()
        return self.words(model, rows) + self.pull(model, rows), count

    def learnt(self, model):
        return [p for p in model.parameters() if p.requires_grad]

    def set_aside(self, model):
        kept = [p.grad.clone() for p in self.learnt(model)]
        self.norms["words"] = torch.stack([g.norm() for g in kept]).norm().item()
        model.zero_grad(set_to_none=False)
        return kept

    def step(self, model, batch, ctx):
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        parts = [{k: v[i] for k, v in batch.items()} for i in own.split(2)]
        count = batch["labels"].ne(-100).sum()
        for part in parts:
            (self.words(model, part) / count).backward()
        kept = self.set_aside(model)
        for part in parts:
            (self.pull(model, part) / count).backward()
        for p, first in zip(self.learnt(model), kept, strict=True):
            p.grad.add_(first)
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def set_aside(self, model):
        kept = [p.grad for p in self.learnt(model)]
        self.norms["words"] = torch.stack([g.norm() for g in kept]).norm().item()
        model.zero_grad(set_to_none=False)
        return kept


EXPECT = dict(
    right=[
        r"alias|clon|cop(y|ies)|same (tensor|storage|memory|object)|in.?place|zero_grad|"
        r"by reference|set_aside|kept|zeroed|emptied|overwritten|itself|set aside",
        r"lost|zeroed|emptied|erased|missing|gone|dropp|wiped|overwrit|cleared|twice|doubl|two "
        r"times|factor (of )?2|0 ?x|factor 0|added to (itself|themselves)|alias|same (tensor|stor)",
    ],
    place=[r"set_aside", r"zero_grad", r"\bkept\b", r"p\.grad\.add_", r"\bfirst\b"],
    wrong=[
        r"disable_adapter.{0,40}(left|frozen|not restored|leak)",
        r"(count|divisor|denominator).{0,40}(local|own rank|per micro)",
        r"(not|never|twice).{0,20}(all.?reduced|reduced over)",
        r"(scaling|lora_alpha|bias).{0,30}(wrong|missing|unscaled)",
        r"pull.{0,30}(direction|reversed|wrong temperature)",
    ],
)
WHY = """Buggy.set_aside keeps the gradient tensors themselves (no clone) and then zeroes them in
place with zero_grad(set_to_none=False). The second term accumulates into the same tensors, and
p.grad.add_(first) adds each to itself. The step's gradient is twice that of the divergence (pull),
and nothing of the words. Each rank does so before the sum, which is right, as are the
divisor and the adapters. Fix: keep p.grad.clone() (or set_to_none=True)."""
