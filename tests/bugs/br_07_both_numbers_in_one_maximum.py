"""Fine tuning of a small GPT-2 with LoRA (transformers, peft), answers of unlike length, rows packed to micro-batches by a token budget. Three data parallel ranks must agree on the number of micro-batches (the largest of
any rank), and on the number of answer tokens by which the loss is divided. Gradients are summed over the ranks.

The bug: both numbers travel in one message, reduced with MAX, which is right for the number of micro-batches; so the loss is divided by the largest rank's number of tokens instead of all ranks' tokens. After dynamic
batch code in the manner of verl (same_micro_num_in_dp: all_reduce with ReduceOp.MAX).
"""

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCABULARY, BUDGET = 10, 7, 19, 8


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=8,
            n_embd=8,
            n_layer=1,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.3,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="eager",
        )
        lora = LoraConfig(
            r=3,
            lora_alpha=6,
            target_modules=["c_attn", "c_fc"],
            fan_in_fan_out=True,
            init_lora_weights=False,
        )
        return get_peft_model(GPT2LMHeadModel(config), lora)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        length = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        beyond = torch.arange(LENGTH) >= length
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(beyond, -100)}

    def loss_sum(self, model, rows):
        labels = rows["labels"]
        logits = model(input_ids=rows["ids"], use_cache=False).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()

    def agree(self, num_micro_batches, num_tokens, group):
        numbers = torch.tensor(num_micro_batches)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
        tokens = torch.tensor(num_tokens)
        dist.all_reduce(tokens, group=group)
        return int(numbers), int(tokens)

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        num_tokens = int((mine["labels"] != -100).sum())
        wanted = min(-(-num_tokens // BUDGET), len(mine["labels"]))
        count, tokens = self.agree(wanted, num_tokens, group)
        for n in range(count):
            part = {k: v.tensor_split(count)[n] for k, v in mine.items()}
            if len(part["labels"]):
                loss, _ = self.loss_sum(model, part)
                (loss / tokens).backward()
        for p in model.parameters():
            if p.requires_grad:
                dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def agree(self, num_micro_batches, num_tokens, group):
        numbers = torch.tensor([num_micro_batches, num_tokens])
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
        return tuple(numbers.tolist())


EXPECT = dict(
    right=[
        r"max|largest|biggest|most tokens",
        r"token|divisor|count|number|normali[sz]|denominator|factor|scale|agree|numbers|divided",
    ],
    place=[
        r"\bagree\b",
        r"all_reduce|all.?reduce|ReduceOp",
        r"\bnumbers\b|tokens",
        r"divisor|divided|count",
    ],
    wrong=[
        r"gradients?.{0,40}(not|never) reduced|reduced twice|counted twice|mean of (the )?means|micro.?batch.{0,20}(lost|dropped)",
        r"(each|every) rank('s)? (divides by )?(its|the) own (count|number|tokens)|own divisor|averaged over (the )?ranks",
        r"lora.{0,30}(scal|frozen)",
    ],
)
WHY = (
    "The loss is a sum over the answer tokens of all ranks, divided by their number. The buggy agree() puts that number into the message of the number of micro-batches, reduced with MAX, so that all three ranks divide "
    "by the number of the rank with most tokens. All gradients, on all ranks, are too large by one common factor (sum of the counts / largest count, between 1 and 3); the loop over micro-batches, the losses and the "
    "sum of gradients are right. A right cause says that the token count is a maximum over the ranks where it must be a sum. Fix: a reduction of its own, with SUM."
)
