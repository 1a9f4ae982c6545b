"""GRPO on GPT-2 of transformers under DDP: prompts padded on the left to the longest of the micro-batch, completions on the right, clipped ratios and a KL
term, normalised by all completion tokens. After the reports on position_ids of left-padded batches with absolute positions.
"""

import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
VOCABULARY, MICROS, CLIP, BETA = 47, 2, 0.2, 0.04
PROMPTS, COMPLETIONS = [3, 7, 4, 5, 2, 6, 4, 6, 3], [6, 2, 5, 3, 6, 4, 5, 1, 4]
ROWS, P, C = len(PROMPTS), max(PROMPTS), max(COMPLETIONS)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = GPT2Config(
            n_layer=2, n_head=2, n_embd=16, vocab_size=VOCABULARY, n_positions=P + C, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, initializer_range=0.1, attn_implementation="eager",
        )  # fmt: skip
        return GPT2LMHeadModel(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        before = torch.arange(P) >= P - torch.tensor(PROMPTS)[:, None]
        after = torch.arange(C) < torch.tensor(COMPLETIONS)[:, None]
        old = -3.85 + 0.25 * torch.randn(ROWS, C, generator=g)
        return {
            "prompt": torch.randint(1, VOCABULARY, (ROWS, P), generator=g) * before,
            "completion": torch.randint(1, VOCABULARY, (ROWS, C), generator=g) * after,
            "before": before,
            "after": after,
            "advantage": torch.randn(ROWS, generator=g),
            "old": old,
            "reference": old + 0.3 * torch.randn(ROWS, C, generator=g),
        }

    def positions(self, mask):
        return {"position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}

    def log_probs(self, model, rows):
        ids = torch.cat([rows["prompt"], rows["completion"]], 1)
        mask = torch.cat([rows["before"], rows["after"]], 1)
        out = model(input_ids=ids, attention_mask=mask.long(), **self.positions(mask))
        logits = out.logits[:, -C - 1 : -1]
        return logits.log_softmax(-1).gather(-1, rows["completion"][..., None]).squeeze(-1)

    def loss_sum(self, model, rows):
        logp = self.log_probs(model, rows)
        ratio, advantage = (logp - rows["old"]).exp(), rows["advantage"][:, None]
        policy = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        away = rows["reference"] - logp
        loss = -policy + BETA * (away.exp() - away - 1)
        return (loss * rows["after"]).sum(), rows["after"].sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def shortened(self, rows):
        """Without the columns on the left that are padding in all rows."""
        longest = int(rows["before"].sum(1).max())
        return {
            **rows,
            "prompt": rows["prompt"][:, P - longest :],
            "before": rows["before"][:, P - longest :],
        }

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = mine["after"].sum()
        dist.all_reduce(count)
        for i in range(MICROS):
            micro = self.shortened({k: v.tensor_split(MICROS)[i] for k, v in mine.items()})
            with contextlib.nullcontext() if i == MICROS - 1 else model.no_sync():
                loss, _ = self.micro_loss(model, micro)
                (loss * ctx.world_size / count).backward()

    def micro_loss(self, model, rows):
        return self.loss_sum(model, rows)


class Policy(Clean):
    """What the trainer calls: the same loss, without positions of its own."""

    def positions(self, mask):
        return {}


class Buggy(Clean):
    def micro_loss(self, model, rows):
        return Policy(self.seed).loss_sum(model, rows)


EXPECT = dict(
    right=[
        r"wpe|position",
        r"forward|input|goes into|reads|looks up|embedd|index|ids|other (rows|places|positions|vectors)",
    ],
    place=[r"wpe|position"],
    wrong=[
        r"(own|local) (count|denominator|divisor)",
        r"(never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"goes wrong in (wte|h\.|transformer\.h|lm_head)",
        r"(backward of|gradient of) \S+ is wrong while|gradient of other targets",
        r"advantage\S* (is|are) wrong|rows? .{0,20}(never read|read twice)",
    ],
)
WHY = (
    "The step calls GPT-2 without position_ids, so the absolute positions count from the first column of the padded micro-batch and not from the first token of the "
    "prompt. Rows with padding on the left (row 0 on rank 0, row 4 on rank 1, row 6 on rank 2, all in the first micro-batch, where they stand beside a longer prompt) get wpe's vectors "
    "of places 4, 3 and 2 further on; rows without padding are right. So the forward is wrong from the position embedding on, in those rows only; targets, masks, "
    "advantages, divisor and reduction are right. Right are positions from the cumulative sum of the mask."
)
