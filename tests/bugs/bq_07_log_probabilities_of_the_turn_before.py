"""A GRPO update of a LoRA policy (peft on a tiny Llama of transformers) sharded by FSDP2 over three ranks: seven completions with advantages, two micro-batches each; clipped ratio against the log-probabilities that were stored when the completions were sampled (the policy has
had optimizer steps on this generation batch since), and a k3 divergence from the model without adapter. Loss per token over all completion tokens.

The bug: the old log-probabilities are taken to be the detached current ones, as is right only for the first step after generation, so the ratio is always one and nothing is ever clipped. After TRL GRPOTrainer's shortcut for num_iterations = 1 with steps_per_generation larger than
the accumulation (old_per_token_logps = per_token_logps.detach()).
"""

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, PROMPT, ANSWER, VOCABULARY = 7, 3, 5, 17
CLIP, BETA = 0.2, 0.1


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=12,
            intermediate_size=18,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
            initializer_range=0.25,
            attn_implementation="eager",
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=None,
        )
        lora = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"])
        model = get_peft_model(LlamaForCausalLM(config), lora)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.3)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(2, ANSWER + 1, (ROWS, 1), generator=g)
        old = -3 + 0.6 * torch.randn(ROWS, ANSWER, generator=g)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, PROMPT + ANSWER), generator=g),
            "mask": torch.arange(ANSWER) < lengths,
            "advantages": torch.randn(ROWS, generator=g),
            "old_logps": old,
        }

    @staticmethod
    def per_token_logps(model, ids):
        logits = model(input_ids=ids, use_cache=False).logits[:, PROMPT - 1 : -1]
        return logits.log_softmax(-1).gather(2, ids[:, PROMPT:, None]).squeeze(2)

    @staticmethod
    def reference_logps(model, ids):
        with torch.no_grad(), model.disable_adapter():
            return Clean.per_token_logps(model, ids)

    @staticmethod
    def objective(logps, old, reference, rows):
        ratio, advantage = (logps - old).exp(), rows["advantages"][:, None]
        gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        kl = (reference - logps).exp() - (reference - logps) - 1
        return ((BETA * kl - gain) * rows["mask"]).sum()

    def loss_sum(self, model, rows):
        reference = self.reference_logps(model, rows["ids"])
        logps = self.per_token_logps(model, rows["ids"])
        return self.objective(logps, rows["old_logps"], reference, rows), rows["mask"].sum()

    def distribute(self, model, ctx):
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mesh=ctx.mesh)
        return fully_shard(model, mesh=ctx.mesh)

    def old_per_token_logps(self, inputs, logps):
        return inputs["old_logps"]

    def compute_loss(self, model, inputs):
        reference = self.reference_logps(model, inputs["ids"])
        logps = self.per_token_logps(model, inputs["ids"])
        old = self.old_per_token_logps(inputs, logps)
        return self.objective(logps, old, reference, inputs)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        tokens = mine["mask"].sum()
        dist.all_reduce(tokens, group=ctx.group("dp"))
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            model.set_requires_gradient_sync(n == 1)
            (self.compute_loss(model, part) * ctx.world_size / tokens).backward()


class Buggy(Clean):
    def old_per_token_logps(self, inputs, logps):
        return logps.detach()  # one iteration: on-policy


EXPECT = dict(
    right=[
        r"ratio|old|importance|clip|clamp|on.?policy|sampling|detach|objective",
        r"log.?prob|logps|detach|current|own|one\b|\b1\b|stored|sampled|old_logps|input|not (used|read)|never (used|read)|ignor|unused|differ",
    ],
    place=[
        r"old_per_token_logps|old_logps",
        r"objective",
        r"compute_loss",
        r"ratio|\bold\b|detach",
    ],
    wrong=[
        r"all.?reduce.{0,40}(missing|twice|wrong)|not reduced|reduced twice|reduce.?scatter.{0,30}(missing|twice)",
        r"divisor|token count|mean of means|own count|times world|averag",
        r"adapter.{0,40}(enabled|active|left on|switched)|reference.{0,30}(with adapter|wrong)",
        r"last micro.?batch|requires_gradient_sync|overwritten|wrong rows",
    ],
)
WHY = (
    "compute_loss compares the policy with its own detached log-probabilities instead of inputs['old_logps']: the ratio is one for every token of all ranks, so each token's gradient lacks the factor exp(logp - old), and the tokens that are clipped in truth (zero gradient) learn, too; "
    "the divergence term, the token count, adapter and sharding are right. Loss value and gradient are wrong on every rank in every micro-batch. A right cause says that the ratio's denominator is the detached current log-probability (the stored old ones are not used). Fix: use the stored ones."
)
