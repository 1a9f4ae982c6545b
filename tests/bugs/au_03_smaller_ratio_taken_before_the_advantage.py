"""PPO on completions of a tiny GPT-2 (transformers) under DDP on two ranks with three and two micro-batches (no_sync but for the last): ratio of new and old probability of every completion token, clipped surrogate, one advantage per
row. The divisor is the number of completion tokens of all ranks.

The bug: the minimum is taken over the ratio and the clipped ratio, and the advantage is multiplied afterwards: min(r, clip(r)) * A instead of min(r * A, clip(r) * A). As in takuseno/ppo issue 3 (Incorrect Surrogate Loss
Equation), asked for in tensorlayer issue 1072.
"""

import contextlib

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
WORDS, LENGTH, PROMPT, CLIP = 11, 8, 3, 0.2
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 6), (6, 9)]]
ADVANTAGE = [1.1, 0.7, -0.9, 0.6, -1.3, 0.8, 1.2, -0.7, 0.5]
ENDS = [8, 6, 7, 8, 5, 7, 8, 8, 6]


def scored(rows):
    place = torch.arange(1, LENGTH)
    return (place >= PROMPT) & (place < rows["end"][:, None])


def surrogate(model, rows, before):
    ids = rows["ids"]
    logp = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    logp = logp.gather(-1, ids[:, 1:, None])[..., 0]
    ratio = torch.exp(logp - rows["old"])
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    advantage = rows["advantage"][:, None]
    if before:
        gain = torch.minimum(ratio, clipped) * advantage
    else:
        gain = torch.minimum(ratio * advantage, clipped * advantage)
    return -(gain * scored(rows)).sum()


class Clean:
    before = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=WORDS,
                n_positions=LENGTH,
                bos_token_id=None,
                eos_token_id=None,
                n_embd=8,
                n_layer=1,
                n_head=2,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                initializer_range=0.2,
                use_cache=False,
                attn_implementation="eager",
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(ADVANTAGE)
        old = torch.randn(rows, LENGTH - 1, generator=g) * 0.5
        return {
            "ids": torch.randint(WORDS, (rows, LENGTH), generator=g),
            "old": old - float(torch.tensor(float(WORDS)).log()),
            "advantage": torch.tensor(ADVANTAGE),
            "end": torch.tensor(ENDS),
        }

    def loss_sum(self, model, rows):
        return surrogate(model, rows, False), max(int(scored(rows).sum()), 1)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        count = int(scored(batch).sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (surrogate(model, rows, self.before) * ctx.world_size / count).backward()


class Buggy(Clean):
    before = True


EXPECT = dict(
    right=[
        r"(?i)loss|surrogate|objective|ratio|clip|minimum|advantage",
        r"(?i)rows? [0-9 ,and]*\b[247]\b|negative|advantage|some (of the )?(rows|tokens)|rows?|tokens?",
        r"(?i)wrong|other|different|differ|not (the )?(same|right)|deviat|weight|coefficient|clip|minimum",
    ],
    place=[r"(?i)loss|surrogate|ratio|clip|rows? [0-9]|logits|advantage"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted twice|no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)(logits|transformer|lm_head|attention|wte|wpe)[^.]{0,40}forward is wrong|forward goes wrong (at|in|from) (transformer|lm_head)",
        r"(?i)backward of (transformer|lm_head|the model|attention)[^.]{0,30}is wrong",
        r"(?i)(all|every) rows? (is|are|has|have) .{0,20}wrong|only (on )?rank [01]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
    ],
)
WHY = (
    "The loss is wrong for the rows with a negative advantage: row 2 (rank 0, micro-batch 1), row 4 (rank 0, micro-batch 2; row 3 beside it is right) and row 7 (rank 1, micro-batch 1; rows 6 and 8 beside it are right). With A < 0,"
    " min(r A, clip(r) A) = A max(r, clip(r)); the bug computes A min(r, clip(r)). Tokens with r > 1.2 should pass their gradient (they pass none), tokens with r < 0.8 should pass none (they pass r A); tokens with r between 0.8 "
    "and 1.2 are right. Rows with a positive advantage are right. The logits, log-probabilities and the forward of the model are right, the gradients of all parameters are wrong, equally on both ranks after DDP's average. Divisor "
    "(completion tokens of all ranks), no_sync and reduction are right. Fix: multiply by the advantage first, then take the minimum."
)
