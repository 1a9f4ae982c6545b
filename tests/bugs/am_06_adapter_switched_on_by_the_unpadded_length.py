"""Activated LoRA (aLoRA) of peft on a tiny GPT2LMHeadModel (from a config) under DDP on three ranks, two micro-batches each: the adapter acts from the invocation tokens to the end of a row. Rows are padded on the right to the longest of
their micro-batch. The training loop passes alora_offsets itself. Only tokens behind the invocation count in the loss; the divisor is their number on all ranks.

The bug: peft counts alora_offsets back from the end of the row as it stands in the batch, padding included (calculate_alora_offsets); the loop computes them before padding, as (own length - start). In a padded row the adapter comes on
too late, by the number of padding tokens. aLoRA: huggingface/peft pull request 2609; strictness about padding there is discussed in foundation-model-stack/fms-hf-tuning pull request 513.
"""

import contextlib

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
TOKENS, VOCABULARY, WIDTH, INVOKE, PAD = 10, 19, 8, [17, 18], 0
PARTS = [[(0, 2), (2, 4)], [(4, 7), (7, 9)], [(9, 10), (10, 12)]]
LENGTHS = [10, 8, 9, 9, 7, 10, 8, 8, 10, 8, 9, 10]
STARTS = [4, 3, 2, 5, 2, 3, 4, 3, 5, 1, 4, 6]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=TOKENS,
            n_embd=WIDTH,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=1,
            initializer_range=0.4,
            use_cache=False,
            attn_implementation="eager",
        )
        adapter = LoraConfig(
            r=3,
            lora_alpha=6,
            lora_dropout=0.0,
            target_modules=["c_attn"],
            fan_in_fan_out=True,
            init_lora_weights=False,
            task_type="CAUSAL_LM",
            alora_invocation_tokens=INVOKE,
        )
        self.lm = get_peft_model(GPT2LMHeadModel(config), adapter)

    def forward(self, ids, mask, offsets):
        return self.lm(input_ids=ids, attention_mask=mask, alora_offsets=offsets).logits


def answer_loss(model, rows, unpadded):
    longest = int(rows["length"].max())
    ids, length, start = rows["ids"][:, :longest], rows["length"], rows["start"]
    place = torch.arange(longest)[None]
    mask = (place < length[:, None]).long()
    end = length if unpadded else torch.full_like(length, longest)
    logits = model(ids, mask, (end - start).tolist())
    answer = (place > start[:, None]) & (place < length[:, None])
    labels = ids.masked_fill(~answer, -100)
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=-100
    )


def answer_tokens(rows):
    return int((rows["length"] - rows["start"] - 1).sum())


class Clean:
    unpadded = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(LENGTHS)
        ids = torch.randint(1, INVOKE[0], (rows, TOKENS), generator=g)
        for row, (start, length) in enumerate(zip(STARTS, LENGTHS)):
            ids[row, start : start + 2] = torch.tensor(INVOKE)
            ids[row, length:] = PAD
        return {"ids": ids, "length": torch.tensor(LENGTHS), "start": torch.tensor(STARTS)}

    def loss_sum(self, model, rows):
        return answer_loss(model, rows, False), answer_tokens(rows)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        tokens = answer_tokens(batch)
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (answer_loss(model, rows, self.unpadded) * ctx.world_size / tokens).backward()


class Buggy(Clean):
    unpadded = True


EXPECT = dict(
    right=[
        r"(?i)forward|input|offset|adapter|lora",
        r"(?i)lora|adapter|c_attn|offset",
        r"(?i)rows?|padd|short|length|offset|token|trim|forward",
    ],
    place=[r"(?i)c_attn|lora|adapter|offset"],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their) own|mean of means|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)forward is right|wrong only in the backward|backward (alone )?is wrong",
        r"(?i)labels? .{0,15}(is|are) (wrong|shifted)|padding .{0,15}attended|attention mask .{0,15}wrong",
        r"(?i)only (on )?rank [012]\b|all rows|lora.{0,20}scal(e|ing) .{0,15}wrong",
    ],
)
WHY = (
    "peft switches the adapter on in the last alora_offsets[i] columns of the padded row. Rows that are padded in their micro-batch get (own length - start), too small by the padding, so the adapter starts that many tokens behind the "
    "invocation (and ends with the padding): rank 0 row 1 (2 late); rank 1 rows 4 (3 late) and 6 (2 late), and row 7 (2 late); rank 2 row 10 (1 late). Rows that are the longest of their micro-batch (0, 2, 3, 5, 8, 9, 11) are right, so "
    "rank 0's second and rank 2's first micro-batch are right. The forward goes wrong at the c_attn of the first block (LoRA part), in those rows only; gradients of all lora_A and lora_B are wrong, equally on all ranks after DDP. Labels, "
    "attention mask, divisor, no_sync, reduction are right. Fix: offset = padded width - start (or let peft find it from input_ids)."
)
