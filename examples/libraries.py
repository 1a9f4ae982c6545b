"""Steps that a library takes: transformers' Trainer, accelerate, peft, torchtitan.

sumgrad run examples/dp3.yaml --workload examples/libraries.py:TrainerStep
"""

import contextlib

import torch
import torch.distributed as dist
from gpt2_ddp import GPT2
from torch.nn import functional as F
from transformers_models import Llama


class TrainerStep(GPT2):
    """Trainer's own training_step: it divides by num_items_in_batch, the tokens of all ranks, and
    multiplies by the ranks, because DDP averages."""

    def distribute(self, model, ctx):
        from transformers import Trainer, TrainingArguments

        self.trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir="unused", use_cpu=True, report_to=[], average_tokens_across_devices=True,
                gradient_accumulation_steps=2,
            ),
        )  # fmt: skip
        self.trainer.create_accelerator_and_postprocess()
        self.trainer.current_gradient_accumulation_steps = 2
        self.trainer.model_wrapped = self.trainer.accelerator.prepare_model(model)
        return self.trainer.model_wrapped

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        micros = [
            {"input_ids": m["ids"], "attention_mask": m["mask"], "labels": m["labels"]}
            for m in ({k: v.tensor_split(2)[i] for k, v in mine.items()} for i in range(2))
        ]
        count = sum((m["labels"][:, 1:] != -100).sum() for m in micros)
        dist.all_reduce(count)
        for i, micro in enumerate(micros):
            with model.no_sync() if i == 0 else contextlib.nullcontext():
                self.trainer.training_step(model, micro, num_items_in_batch=count)


class Accelerated(GPT2):
    """accelerate's accumulation: backward() divides by its steps, so the loss is multiplied."""

    def distribute(self, model, ctx):
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        return self.accelerator.prepare_model(model)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = (mine["labels"][:, 1:] != -100).sum()
        dist.all_reduce(count)
        for i in range(2):
            with self.accelerator.accumulate(model):
                loss, _ = self.loss_sum(model, {k: v.tensor_split(2)[i] for k, v in mine.items()})
                self.accelerator.backward(loss * 2 * ctx.world_size / count)


class LoRA(Llama):
    """Only the adapters train. Their B is drawn here: zeros would leave A without gradient."""

    def build(self):
        from peft import LoraConfig, get_peft_model

        model = super().build()
        config = LoraConfig(
            r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"], lora_dropout=0.0
        )
        model = get_peft_model(model, config)
        for name, param in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(param, std=0.1)
        return model


class Titan(GPT2):
    """torchtitan's debug Llama under its own parallelize function: FSDP2, which here sums."""

    def build(self):
        from torchtitan.models.common.attention import ScaledDotProductAttention
        from torchtitan.models.llama3 import llama3_configs

        torch.manual_seed(self.seed)
        config = llama3_configs["debugmodel"](attn_backend="flex")
        config.layers = config.layers[:2]
        for layer in config.layers:  # flex attention has no backward on a CPU
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        with torch.device("cpu"):
            model = config.build()
            model.init_states(buffer_device=torch.device("cpu"))
        return model

    def loss_sum(self, model, rows):
        logits, labels = model(rows["ids"]), rows["labels"][:, 1:]
        loss = F.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), labels.flatten(), reduction="sum"
        )
        return loss, (labels != -100).sum()

    def distribute(self, model, ctx):
        from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
        from torchtitan.distributed import ParallelDims, parallel_dims
        from torchtitan.models.llama3.parallelize import parallelize_llama

        way = "partial_dtensor"
        parallel_dims.device_type = "cpu"  # without an accelerator it takes CUDA for granted
        dims = ParallelDims(
            dp_replicate=1, dp_shard=ctx.world_size, cp=1, tp=1, pp=1, ep=1,
            world_size=ctx.world_size, spmd_backend=way,
        )  # fmt: skip
        dims.build_mesh()
        model = parallelize_llama(
            model, parallel_dims=dims, training=TrainingConfig(),
            parallelism=ParallelismConfig(spmd_backend=way),
            compile_config=CompileConfig(enable=False), ac_config=None, dump_folder="unused",
        )  # fmt: skip
        for part in model.modules():
            if hasattr(part, "set_force_sum_reduction_for_comms"):  # gloo has no other reduction
                part.set_force_sum_reduction_for_comms(True)
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, count = self.loss_sum(model, mine)
        dist.all_reduce(count)
        (loss / count).backward()
