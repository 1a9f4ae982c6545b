"""Activated LoRA (peft, LoraConfig(alora_invocation_tokens=...)) on a tiny Llama from scratch, DDP on three ranks with accumulation: the adapter acts from the invocation tokens to the end of the row. The rows come padded on the right
to 12 tokens; peft counts the place of the invocation from the END of the row (alora_offsets). Each micro-batch is trimmed to its longest row.

The bug: the offsets are computed once for all rows of the batch, before the micro-batches are trimmed (and handed over as alora_offsets, which peft then takes as they are). In a micro-batch trimmed by k columns the adapter starts k
tokens too early. After huggingface/peft PR 2609 (Activated LoRA) and foundation-model-stack/fms-hf-tuning PR 513, where users hand over alora_offsets themselves.
"""

import contextlib

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.variants import calculate_alora_offsets
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
TOKENS, VOCABULARY, CALL = 12, 15, [13, 14]
LENGTHS, STARTS = [12, 9, 8, 7, 12, 10, 6, 9, 12, 11], [4, 5, 3, 2, 7, 4, 1, 5, 8, 6]
PARTS = [[(0, 2), (2, 4)], [(4, 5), (5, 7)], [(7, 8), (8, 10)]]


def offsets_of(model, ids):
    return calculate_alora_offsets(model.peft_config, model.active_adapter, ids)


def language_loss(model, rows, offsets):
    n = int(rows["length"].max())
    ids, place = rows["ids"][:, :n], torch.arange(n)
    mask = place < rows["length"][:, None]
    logits = model(input_ids=ids, attention_mask=mask.long(), alora_offsets=offsets).logits
    scored = mask[:, 1:] & (place[1:] > rows["start"][:, None])
    loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return (loss * scored).sum()


class Clean:
    before_trimming = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        base = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=8,
                intermediate_size=10,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=16,
                initializer_range=0.4,
                use_cache=False,
            )
        )
        model = get_peft_model(
            base,
            LoraConfig(
                task_type="CAUSAL_LM",
                r=2,
                lora_alpha=4,
                target_modules=["q_proj", "v_proj"],
                init_lora_weights=False,
                alora_invocation_tokens=CALL,
            ),
        )
        for p in model.parameters():
            p.requires_grad_(True)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(1, VOCABULARY - 2, (len(LENGTHS), TOKENS), generator=g)
        for row, (length, start) in enumerate(zip(LENGTHS, STARTS)):
            ids[row, start : start + 2] = torch.tensor(CALL)
            ids[row, length:] = 0
        return {"ids": ids, "length": torch.tensor(LENGTHS), "start": torch.tensor(STARTS)}

    def loss_sum(self, model, rows):
        n = int(rows["length"].max())
        count = int((rows["length"] - 1 - rows["start"]).sum())
        return language_loss(model, rows, offsets_of(model, rows["ids"][:, :n])), count

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        tokens = int((batch["length"] - 1 - batch["start"]).sum())
        whole = offsets_of(model.module, batch["ids"])
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            n = int(rows["length"].max())
            if self.before_trimming:
                offsets = whole[low:high]
            else:
                offsets = offsets_of(model.module, rows["ids"][:, :n])
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (language_loss(model, rows, offsets) * ctx.world_size / tokens).backward()


class Buggy(Clean):
    before_trimming = True


EXPECT = dict(
    right=[
        r"(?i)q_proj|v_proj|lora|adapter|attention|self_attn|layers?\.0|forward",
        r"(?i)forward|output|input|token|position|offset|place|earlier|differs|active|mask",
        r"(?i)micro.?batch|rows? \d|rank|lora|adapter|q_proj",
    ],
    place=[r"(?i)q_proj|v_proj|lora|adapter|self_attn|attention|layers?\.0"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward is right|wrong only in the backward",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)labels? .{0,20}(is|are) (wrong|shifted)|embed_tokens.{0,20}(forward|output).{0,15}wrong",
        r"(?i)only (on )?rank [012]\b|adapter .{0,20}(switched off|not used|never (used|applied))|wrong scaling",
    ],
)
WHY = (
    "Right micro-batches: those with a row of 12 tokens, nothing is trimmed: rank 0 micro-batch 0 (rows 0, 1), rank 1 micro-batch 0 (row 4), rank 2 micro-batch 1 (rows 8, 9). Wrong: rank 0 micro-batch 1 (rows 2, 3; trimmed from 12 "
    "to 8, the adapter starts 4 tokens too early, at the row's begin since its start is 3 and 2), rank 1 micro-batch 1 (rows 5, 6; trimmed to 10, 2 too early), rank 2 micro-batch 0 (row 7; trimmed to 9, 3 too early). There the "
    "outputs of q_proj and v_proj (LoRA part added to tokens before the invocation) are wrong from layer 0 on, the embedding's output is right. The gradients of all parameters are wrong in direction, equally on all ranks after "
    "DDP's average. Labels, divisor, reduction and no_sync are right. Fix: compute the offsets on the trimmed ids of each micro-batch (or subtract the trimmed columns)."
)
