"""Fine-tuning of a tiny Llama (transformers) with accelerate on three ranks, three micro-batches each: accelerator.no_sync for all but the last. A micro-batch without a single answer token (prompts cut at the maximum length leave no
answer) has no loss; the ranks agree with a small all-reduce whether any of them has tokens in the turn, and skip the turn together if none has. The divisor is the number of answer tokens of all ranks.

The bug: the turn that synchronises is the last one of the window, and it is among those skipped: no backward runs outside no_sync, and the gradients are never averaged. Skipping in lockstep as in NVIDIA-NeMo/Automodel PR 2468,
cure for the hang described there, with the boundary fixed by the turn's number as in many loops (compare modelscope/FunASR PR 3472).
"""

import contextlib
import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
WORDS, LENGTH = 11, 6
PARTS = [[(0, 2), (2, 3), (3, 4)], [(4, 5), (5, 7), (7, 9)], [(9, 11), (11, 12), (12, 13)]]
ANSWER = [2, 3, 5, 6, 4, 3, 2, 6, 6, 3, 4, 6, 6]  # first answer token of each row


def answers(rows):
    return torch.arange(LENGTH)[None] >= rows["answer"][:, None]


def answer_loss(model, rows):
    logits = model(input_ids=rows["ids"]).logits[:, :-1]
    labels = rows["ids"].masked_fill(~answers(rows), -100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Clean:
    by_number = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=WORDS,
                hidden_size=8,
                intermediate_size=12,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=LENGTH,
                initializer_range=0.3,
                use_cache=False,
                attn_implementation="eager",
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(WORDS, (len(ANSWER), LENGTH), generator=g),
            "answer": torch.tensor(ANSWER),
        }

    def loss_sum(self, model, rows):
        return answer_loss(model, rows), max(int(answers(rows).sum()), 1)

    def distribute(self, model, ctx):
        for name, value in (("RANK", ctx.rank), ("LOCAL_RANK", ctx.rank)):
            os.environ[name] = str(value)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ[name] = str(ctx.world_size)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True)
        return self.accelerator.prepare(model)

    def step(self, model, batch, ctx):
        count = int(answers(batch).sum())
        turns = [{k: v[low:high] for k, v in batch.items()} for low, high in PARTS[ctx.rank]]
        tokens = torch.tensor([int(answers(rows).sum()) for rows in turns])
        dist.all_reduce(tokens, group=ctx.group("dp"))  # do any of us have answers in the turn?
        there = [turn for turn, n in enumerate(tokens.tolist()) if n]
        last = len(turns) - 1 if self.by_number else there[-1]
        for turn in there:
            sync = turn == last
            with contextlib.nullcontext() if sync else self.accelerator.no_sync(model):
                loss = answer_loss(model, turns[turn])
                self.accelerator.backward(loss * ctx.world_size / count)


class Buggy(Clean):
    by_number = True


EXPECT = dict(
    right=[
        r"(?i)(not|never|no|without|missing|lack|un).{0,40}(reduc|averag|synchroni|sync|sum|exchang|all.?reduce)|(reduc|averag|synchroni|sync|sum|all.?reduce).{0,40}(not|never|missing|skipped|left out|did not|"
        r"no )|no_sync|own rows|own gradient|local",
        r"(?i)reduc|averag|sync|sum|all.?reduce|ranks? (differ|disagree|hold|keep)|own|local",
    ],
    place=[r"(?i)all (the )?param|every param|all gradients|reduction|all.?reduce|ddp|sync|ranks?"],
    wrong=[
        r"(?i)(reduced|summed|averaged) (twice|again)|counted (twice|again)|too early|before the last",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own (tokens|count|rows)",
        r"(?i)forward (is|goes) wrong|goes wrong in the (forward|backward) of|backward of .{0,40} is wrong",
        r"(?i)(labels?|targets?|ids|loss) (is|are) wrong",
        r"(?i)(only )?(the )?(first|second) micro.?batch(es)? .{0,20}(lost|dropped|overwritten|missing|is reduced)",
        r"(?i)only (on )?rank [012]\b (is|goes|misses|lacks)|some parameters|(only )?(lm_head|embed_tokens) (is|are)",
    ],
)
WHY = (
    "Nothing is reduced. In turn 2 (rows 3; 7, 8; 12) no rank has an answer token, so all ranks skip it; turn 2 was to be the one outside no_sync. Turns 0 and 1 run inside no_sync on all ranks, so the gradients of all parameters "
    "on every rank are the rank's own: 3 / N times the sum over its own rows (rank 0: rows 0-2, rank 1: rows 4-6, rank 2: rows 9, 10, row 11 has no answer), instead of the average (sum over all rows / N). The gradients differ "
    "between the ranks and their mean is the right gradient. Forward, loss, labels, divisor N, the accumulation of the two turns and each rank's own backward are right. Fix: synchronise on the last turn that is not skipped (known "
    "from the same all-reduce), or run the backward of a zero loss in the last turn."
)
