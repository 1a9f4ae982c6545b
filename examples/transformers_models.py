"""Models of transformers under DDP, FSDP2, FSDP1 and their own tensor parallel plan.

    sumgrad run examples/dp3.yaml --workload examples/transformers_models.py:LlamaFSDP2

Nothing is downloaded: configurations are made here, a few thousand weights each.
"""

import torch
import torch.distributed as dist
from gpt2_ddp import GPT2, LENGTH, VOCABULARY
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

SMALL = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 24,
    "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH,
}  # fmt: skip
DECODER = {**SMALL, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}


class Llama(GPT2):
    """DDP, as GPT2's page has it."""

    def build(self):
        torch.manual_seed(self.seed)
        return LlamaForCausalLM(LlamaConfig(**DECODER))


class Qwen3(GPT2):
    def build(self):
        torch.manual_seed(self.seed)
        return Qwen3ForCausalLM(Qwen3Config(**DECODER, head_dim=4))


class GPT2Checkpointed(GPT2):
    """With the model's own checkpoints."""

    def build(self):
        model = super().build()
        model.gradient_checkpointing_enable()
        return model


class Sharded(GPT2):
    """FSDP2, every layer a unit. It sums: its own division by the ranks is switched off."""

    policy = MixedPrecisionPolicy()

    def layers(self, model):
        return model.transformer.h

    def distribute(self, model, ctx):
        for layer in self.layers(model):
            fully_shard(layer, mesh=ctx.mesh, mp_policy=self.policy)
        fully_shard(model, mesh=ctx.mesh, mp_policy=self.policy)
        for part in model.modules():
            if hasattr(part, "set_force_sum_reduction_for_comms"):
                part.set_force_sum_reduction_for_comms(True)
                part.set_gradient_divide_factor(1.0)
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, count = self.loss_sum(model, mine)
        dist.all_reduce(count)
        (loss / count).backward()


class GPT2FSDP2(Sharded):
    pass


class LlamaFSDP2(Sharded, Llama):
    def layers(self, model):
        return model.model.layers


class Qwen3FSDP2(Sharded, Qwen3):
    def layers(self, model):
        return model.model.layers


class LlamaMixed(LlamaFSDP2):
    """In bfloat16, reduced in float32: right in float64, and as coarse as was asked for."""

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class GPT2FSDP1(GPT2):
    """The older FSDP averages, as DDP does."""

    def distribute(self, model, ctx):
        return FullyShardedDataParallel(
            model, use_orig_params=True, device_id=torch.device("cpu"),
            auto_wrap_policy=lambda module, recurse, **_: recurse
            or type(module).__name__ == "GPT2Block",
        )  # fmt: skip


class LlamaTP(Llama):
    """The plan that the model itself brings, on a mesh of its own; every rank sees all rows."""

    def distribute(self, model, ctx):
        config = DistributedConfig(tp_size=ctx.mesh.size(), tp_plan="auto")
        plan, *_ = model._resolve_parallel_plans(config)
        return apply_tensor_parallelism(model, ctx.mesh, plan)

    def step(self, model, batch, ctx):
        loss, count = self.loss_sum(model, batch)
        (loss / count).backward()


class Mixtral(GPT2):
    """With the router's balancing loss, which couples all rows: its logits are gathered."""

    coefficient = 0.1

    def build(self):
        torch.manual_seed(self.seed)
        return MixtralForCausalLM(MixtralConfig(**DECODER, num_local_experts=4))

    def terms(self):
        return {"tokens": self.loss_sum_of_tokens, "balance": self.balance}

    def loss_sum_of_tokens(self, model, rows):
        return super().loss_sum(model, rows)

    def balance(self, model, rows):
        out = model(rows["ids"], attention_mask=rows["mask"], output_router_logits=True)
        return self.coefficient * self.balance_of(model, out.router_logits, rows["mask"]), 1

    def balance_of(self, model, logits, mask):
        config = getattr(model, "module", model).config
        return load_balancing_loss_func(
            logits, self.num_experts(config), config.num_experts_per_tok, mask
        )

    def num_experts(self, config):
        return config.num_local_experts

    def loss_sum(self, model, rows):
        loss, count = super().loss_sum(model, rows)
        return loss + count * self.balance(model, rows)[0], count

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        out = model(mine["ids"], attention_mask=mine["mask"], output_router_logits=True)
        labels = mine["labels"][:, 1:]
        loss = F.cross_entropy(
            out.logits[:, :-1].float().flatten(0, 1), labels.flatten(), reduction="sum"
        )
        count = (labels != -100).sum()
        dist.all_reduce(count)
        whole = tuple(gathered(x, mine["mask"], batch["mask"], ctx) for x in out.router_logits)
        balance = self.coefficient * self.balance_of(model, whole, batch["mask"])
        # Every rank has the whole balance; of its gradient, the part that goes through its rows.
        ((loss / count + balance) * ctx.world_size).backward()


def gathered(logits, own, mask, ctx):
    """All ranks' (rows * positions, experts); a gradient flows to this rank's only."""
    width = logits.shape[-1]
    parts = [
        torch.zeros(len(rows) * mask.shape[1], width, dtype=logits.dtype)
        for rows in mask.tensor_split(ctx.world_size)
    ]
    for rank, part in enumerate(parts):
        if rank == ctx.rank:
            part.copy_(logits.detach())
        dist.broadcast(part, rank)
    parts[ctx.rank] = logits
    return torch.cat(parts)


class QwenMoE(Mixtral):
    def build(self):
        torch.manual_seed(self.seed)
        config = Qwen3MoeConfig(
            **DECODER, head_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
        )  # fmt: skip
        return Qwen3MoeForCausalLM(config)

    def num_experts(self, config):
        return config.num_experts


class Bert(GPT2):
    """Masked tokens: their number differs from rank to rank."""

    def build(self):
        torch.manual_seed(self.seed)
        none = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
        return BertForMaskedLM(BertConfig(**SMALL, **none))

    def batch(self):
        batch = super().batch()
        g = torch.Generator().manual_seed(self.seed + 2)
        hidden = (torch.rand(batch["ids"].shape, generator=g) < 0.3) & batch["mask"]
        hidden[:, 0] = True
        return {
            "ids": batch["ids"].masked_fill(hidden, 0),
            "mask": batch["mask"],
            "labels": batch["ids"].masked_fill(~hidden, -100),
        }

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], attention_mask=rows["mask"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")
        return loss, (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, gradient_as_bucket_view=True)


class T5(GPT2):
    """The same text through encoder and decoder."""

    def build(self):
        torch.manual_seed(self.seed)
        config = T5Config(
            num_layers=2, num_heads=4, d_model=16, d_kv=4, d_ff=24, vocab_size=VOCABULARY,
            dropout_rate=0, decoder_start_token_id=0,
        )  # fmt: skip
        return T5ForConditionalGeneration(config)

    def loss_sum(self, model, rows):
        out = model(input_ids=rows["ids"], attention_mask=rows["mask"], labels=rows["labels"])
        labels = rows["labels"]
        loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()
