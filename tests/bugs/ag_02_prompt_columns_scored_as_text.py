"""Prompt tuning (peft, PromptTuningConfig on a tiny Llama from scratch, base frozen in the sense that everything is still differentiated here) under DDP on two ranks with accumulation: three virtual tokens are put in front of every
row by peft, and the loss is written by hand on the logits (weighted tokens, answers only), since the built-in loss knows no weights.

The bug: the logits have 3 + n columns, the labels n; the code makes them equal by cutting the logits at the end, logits[:, :n], instead of leaving out the columns of the virtual tokens. Every label is scored with the logits of
three positions earlier. After huggingface/trl issue 490 (size mismatch for PEFT prompt tuning) and issue 3812, EleutherAI/lm-evaluation-harness PR 533.
"""

import contextlib

import torch
from peft import PromptTuningConfig, TaskType, get_peft_model
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
TOKENS, VOCABULARY, VIRTUAL = 7, 13, 3
LENGTHS, PROMPTS = [7, 5, 6, 7, 4, 6, 7], [2, 1, 3, 4, 1, 2, 5]
PARTS = [[(0, 1), (1, 3)], [(3, 5), (5, 6), (6, 7)]]


def answer_loss(model, rows, from_the_left):
    ids, n = rows["ids"], rows["ids"].shape[1]
    mask = (torch.arange(n) < rows["length"][:, None]).long()
    logits = model(input_ids=ids, attention_mask=mask).logits
    logits = logits[:, :n] if from_the_left else logits[:, logits.shape[1] - n :]
    place = torch.arange(1, n)
    scored = (place >= rows["prompt"][:, None]) & (place < rows["length"][:, None])
    loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return (loss * rows["weight"][:, 1:].to(loss.dtype) * scored).sum()


class Clean:
    from_the_left = False

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
                num_key_value_heads=1,
                max_position_embeddings=32,
                initializer_range=0.4,
                pad_token_id=0,
                use_cache=False,
            )
        )
        model = get_peft_model(
            base, PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=VIRTUAL)
        )
        for p in model.base_model.parameters():
            p.requires_grad_(True)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(LENGTHS)
        return {
            "ids": torch.randint(1, VOCABULARY, (rows, TOKENS), generator=g),
            "weight": torch.rand(rows, TOKENS, generator=g) + 0.5,
            "length": torch.tensor(LENGTHS),
            "prompt": torch.tensor(PROMPTS),
        }

    def loss_sum(self, model, rows):
        return answer_loss(model, rows, False), int((rows["length"] - rows["prompt"]).sum())

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        tokens = int((batch["length"] - batch["prompt"]).sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = answer_loss(model, rows, self.from_the_left)
                (loss * ctx.world_size / tokens).backward()


class Buggy(Clean):
    from_the_left = True


EXPECT = dict(
    right=[
        r"(?i)loss|label|logit|token|target|score|position",
        r"(?i)(other|wrong|shift|mis|earlier|offset|differ|not (the )?(own|right)|another|cut|column|virtual)",
        r"(?i)forward is right|(model|layers?|forward|outputs?|logits?|activations?)[^.]{0,60}(is|are|agree|right|equal|same|correct)|after the (last )?(model|module|forward)|in the loss|loss (itself|function|code)|labels?|logits",
    ],
    place=[r"(?i)loss|logit|label|lm_head|token"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)(goes wrong|wrong).{0,30}only on rank [01]\b|rank [01] alone",
        r"(?i)(embed|attention|mlp|layers?\.[01]|norm|lm_head).{0,30}(output|forward) (is|goes) wrong|wrong (only )?in the backward",
        r"(?i)positions? (ids?|of the model) (is|are) wrong",
    ],
)
WHY = (
    "Both ranks, all five micro-batches, all seven rows: the model's forward is right (peft puts three virtual tokens in front, the logits have 10 columns), but the loss uses columns 0-6 of the logits instead of columns 3-9. The "
    "label of text token t is scored with the logits after text token t - 4 (or after a virtual token) instead of after t - 1. So the loss and the gradients of all parameters (prompt embedding, embedding, layers, norm, head) are "
    "wrong in direction, equally on both ranks after DDP's average; the same right places, weights and count are used for the labels, the divisor is right, so are no_sync and the reduction. Fix: logits[:, VIRTUAL:] before the "
    "shift by one."
)
