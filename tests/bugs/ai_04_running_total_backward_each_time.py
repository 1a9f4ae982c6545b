"""Summarisation fine-tuning of a tiny T5 (transformers, from a config) with accelerate on two ranks with three micro-batches each, of uneven sizes: accelerator.no_sync for all but the last, accelerator.backward for each. The loss is the
sum over target tokens divided by their number on all ranks.

The bug: the loop keeps a running total of the losses (for the log) and calls backward on the total, with retain_graph=True since PyTorch complained about a second backward through the same graph. Earlier micro-batches go backward
again with each later one. As in many threads in which retain_graph=True silenced "Trying to backward through the graph a second time", for instance Eurus-Holmes/MNMT issue 7 and rentruewang/brief issue 1; pytorch/pytorch issue 13494
describes the silent accumulation.
"""

import contextlib
import os

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.nn import functional as F
from transformers import T5Config, T5ForConditionalGeneration
from transformers.utils import logging

logging.set_verbosity_error()
TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
VOCABULARY, SOURCE, TARGET, PAD = 15, 6, 5, 0
SOURCES = [6, 4, 5, 3, 6, 2, 5, 6, 4, 3, 6]
TARGETS = [5, 3, 2, 4, 1, 5, 3, 5, 2, 4, 3]
PARTS = [[(0, 2), (2, 4), (4, 6)], [(6, 7), (7, 9), (9, 11)]]


def losses(model, rows):
    logits = model(
        input_ids=rows["ids"], attention_mask=rows["mask"], decoder_input_ids=rows["shifted"]
    ).logits
    return F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")


class Clean:
    total = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY,
                d_model=8,
                d_kv=4,
                d_ff=12,
                num_layers=1,
                num_decoder_layers=1,
                num_heads=2,
                relative_attention_num_buckets=8,
                relative_attention_max_distance=8,
                dropout_rate=0.0,
                initializer_factor=0.6,
                use_cache=False,
                pad_token_id=PAD,
                decoder_start_token_id=PAD,
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(SOURCES)
        mask = (torch.arange(SOURCE)[None] < torch.tensor(SOURCES)[:, None]).long()
        there = torch.arange(TARGET)[None] < torch.tensor(TARGETS)[:, None]
        target = torch.randint(1, VOCABULARY, (rows, TARGET), generator=g) * there
        return {
            "ids": torch.randint(1, VOCABULARY, (rows, SOURCE), generator=g) * mask,
            "mask": mask,
            "shifted": torch.cat([torch.full((rows, 1), PAD), target[:, :-1]], 1),
            "labels": target.masked_fill(~there, -100),
        }

    def loss_sum(self, model, rows):
        return losses(model, rows), int((rows["labels"] != -100).sum())

    def distribute(self, model, ctx):
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.update(
            RANK=str(ctx.rank),
            WORLD_SIZE=str(ctx.world_size),
            LOCAL_RANK=str(ctx.rank),
            LOCAL_WORLD_SIZE=str(ctx.world_size),
        )
        self.accelerator = Accelerator(cpu=True)
        return self.accelerator.prepare(model)

    def step(self, model, batch, ctx):
        tokens = int((batch["labels"] != -100).sum())
        parts, total = PARTS[ctx.rank], 0.0
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            last = turn == len(parts) - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
                loss = losses(model, rows) * ctx.world_size / tokens
                if self.total:
                    total = total + loss
                    self.accelerator.backward(total, retain_graph=True)
                else:
                    self.accelerator.backward(loss)


class Buggy(Clean):
    total = True


EXPECT = dict(
    right=[
        r"(?i)micro.?batch|rows?\b",
        r"(?i)(counted|enter\w*|weighted|contribut\w*|coefficient|times|factor|too (large"
        r"|often)|again|twice|x ?3|3 ?x|weight)",
        r"(?i)\b3\b|three|\b2\b|twice|two|again|repeated|earlier|running|more than once|too often",
    ],
    place=[
        r"(?i)micro.?batch(es)? (0|1|first|the first)|first (two )?micro.?batch|rows? \[?(0|2"
        r"|6|7)|earlier micro.?batch|accumul|backward"
    ],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(never|not) (been )?(all.?)?reduced|reduced (twice|again)",
        r"(?i)mean of means|own count|wrong number of tokens|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)"
        r"|only the last micro.?batch",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)(shared|tied|embed\w*|lm_head)[.\w]* (alone |only )?(is|are) (wrong|counted)",
        r"(?i)last micro.?batch .{0,20}(counted|enters|weighted) (twice|2|3|three)",
    ],
)
WHY = (
    "On both ranks, all parameters: the backward of micro-batch k also goes through the retained graphs of micro-batches 0..k-1. So the first micro-batch (rank 0: rows 0, 1; rank 1: row 6) enters the gradient with coefficient "
    "3 instead of 1, the second (rank 0: rows 2, 3; rank 1: rows 7, 8) with 2, the last (rows 4, 5 and 9, 10) with 1. Forward, each single backward, divisor (all target tokens of both ranks), world-size factor and DDP's "
    "average (with the last backward) are right, and the ranks agree. It is an error of accumulation: contributions counted more than once, not a reduction done twice. Fix: call backward on the loss of the micro-batch and add "
    "loss.detach() to the total."
)
