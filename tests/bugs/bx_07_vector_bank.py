"""peft's VB-LoRA on a GPT-2 in two pipeline stages, times two data parallel replicas: the low-rank factors of all layers are mixed from one bank of vectors, which is the same Parameter in every layer. Stage 0 has the (frozen) embeddings and the first
two blocks, stage 1 the last two, the final norm and the (frozen, tied) head. Two micro-batches; hidden states and their gradients are sent. Shared parameters are summed over the stages, then all over dp.

The bug: what is summed over the stages is Megatron's embedding group, the word embedding alone; the vector bank, used by the layers of both stages, keeps each stage's own part. After peft's VBLoRAModel (shared
vblora_vector_bank) under pipeline parallel trainers, and the reports on tied weights across stages (piper #13).
"""

import torch
import torch.distributed as dist
from peft import VBLoRAConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 2}}}}
ROWS, LENGTH, VOCABULARY, WIDTH, LAYERS = 5, 6, 17, 12, 4


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.25,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="sdpa",
            use_cache=False,
        )
        adapter = VBLoRAConfig(
            r=2,
            num_vectors=6,
            vector_length=4,
            topk=2,
            target_modules=["c_attn"],
            fan_in_fan_out=True,
            vblora_dropout=0.0,
            init_vector_bank_bound=0.5,
            init_logits_std=0.5,
        )
        return get_peft_model(GPT2LMHeadModel(config), adapter)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"]).logits.flatten(0, 1)
        return F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum"), rows[
            "labels"
        ].numel()

    def distribute(self, model, ctx):
        blocks = model.base_model.model.transformer.h
        for index in range(LAYERS):
            if index * ctx.axes["pp"] // LAYERS != ctx.coords["pp"]:
                blocks[index] = nn.Identity()
        return model

    def run_blocks(self, model, x):
        for block in model.base_model.model.transformer.h:
            x = block(x)
        return x

    def shared_parameters(self, model):
        """Parameters that more than one stage uses."""
        lm = model.base_model
        return [lm.model.transformer.wte.weight, *lm.vblora_vector_bank.parameters()]

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        lm, stage = model.base_model.model, ctx.coords["pp"]
        first, last = dist.get_process_group_ranks(ctx.group("pp"))
        mine = {k: x.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, x in batch.items()}
        for i in range(2):
            ids, labels = (mine[k].tensor_split(2)[i] for k in ("ids", "labels"))
            if stage == 0:
                x = lm.transformer.wte(ids) + lm.transformer.wpe(torch.arange(LENGTH))
                x = self.run_blocks(model, x)
                dist.send(x.detach().contiguous(), last)
                grad = torch.empty_like(x)
                dist.recv(grad, last)
                x.backward(grad)
            else:
                x = torch.empty(*ids.shape, WIDTH, dtype=lm.lm_head.weight.dtype)
                dist.recv(x, first)
                x.requires_grad_()
                logits = lm.lm_head(lm.transformer.ln_f(self.run_blocks(model, x))).flatten(0, 1)
                loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
                (loss / batch["labels"].numel()).backward()
                dist.send(x.grad.contiguous(), first)
        for p in self.shared_parameters(model):
            if p.requires_grad:
                dist.all_reduce(p.grad, group=ctx.group("pp"))
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def shared_parameters(self, model):
        return [model.base_model.model.transformer.wte.weight]


EXPECT = dict(
    right=[
        r"vector_bank|bank",
        r"stage|\bpp\b|pipeline",
        r"not (reduced|summed|all.?reduced)|never (reduced|summed)|missing|lacks|without|only (its|the|their) own|own (part|share|contribution)|partial|one stage",
    ],
    place=[r"shared_parameters", r"vector_bank", r"\bpp\b", r"all.?reduce"],
    wrong=[
        r"micro.?batch(es)? .{0,30}(lost|dropped|overwritten|twice|again)",
        r"not reduced over (the )?(axis )?.?dp|over dp.{0,20}missing",
        r"divisor|mean of means|token count|counted twice",
        r"logits_[AB].{0,40}(wrong|missing)",
    ],
)
WHY = (
    "vblora_vector_bank is one Parameter that all four layers use, two on each stage; its gradient is the sum of both stages' parts. Buggy's list of shared parameters has only the frozen word embedding, so that ranks of stage 0 end with the part of the first two layers and ranks of stage 1 "
    "with that of the last two (each summed over dp as it should be). The logits of each layer are right. A right cause says that the vector bank's gradient is not summed over the pipeline axis (each stage has its own part). "
    "Fix: add the bank to the parameters that are summed over pp."
)
