"""A masked diffusion language model (MDLM: BertForMaskedLM of transformers as the denoiser) under DistributedDataParallel with two accumulated micro-batches on three ranks. Times are drawn by the low-discrepancy sampler:
one uniform number u for the batch, row i of N gets t = (u + i / N) mod 1; a token is masked where its noise is below t, and the cross entropy of masked tokens is weighted by 1 / t.

The bug: the sampler counts the rows of the micro-batch at hand and their number, so that all ranks and micro-batches draw the same few times, instead of N spread ones. After the antithetic time sampling of MDLM,
VDM and score-based code, where arange(batch size) / batch size is computed per device from one seed.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForMaskedLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCABULARY, MASK = 10, 6, 17, 16
ACCUMULATION = 2
SMALLEST = 0.05


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = BertForMaskedLM(
            BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=12,
                num_hidden_layers=1,
                num_attention_heads=3,
                intermediate_size=17,
                max_position_embeddings=LENGTH,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                initializer_range=0.3,
                attn_implementation="eager",
            )
        )

    def forward(self, ids, noise, t):
        """Sum over the masked tokens of the weighted cross entropy."""
        masked = noise < t[:, None]
        logits = self.backbone(input_ids=ids.masked_fill(masked, MASK)).logits
        loss = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
        return (loss * masked / t[:, None]).sum()


def stretch(t):
    return (1 - SMALLEST) * (t % 1) + SMALLEST


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Denoiser()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(MASK, (ROWS, LENGTH), generator=g),
            "noise": torch.rand(ROWS, LENGTH, generator=g),
            "u": torch.rand(1, generator=g).expand(ROWS).contiguous(),
            "index": torch.arange(ROWS),
        }

    def loss_sum(self, model, rows):
        t = stretch(rows["u"] + rows["index"] / ROWS)
        return model(rows["ids"], rows["noise"], t), rows["ids"].numel()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def sample_times(self, part):
        return stretch(part["u"] + part["index"] / ROWS)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for i in range(ACCUMULATION):
            part = {k: v.tensor_split(ACCUMULATION)[i] for k, v in mine.items()}
            last = i == ACCUMULATION - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(part["ids"], part["noise"], self.sample_times(part))
                (loss * ctx.world_size / batch["ids"].numel()).backward()  # DDP averages


class Buggy(Clean):
    def sample_times(self, part):
        n = len(part["ids"])
        return stretch(part["u"] + torch.arange(n).to(part["u"]) / n)


EXPECT = dict(
    right=[
        r"time|\bt\b|sampl|noise level|mask(ing)? (rate|ratio|probability)|strat|discrepancy|sample_times",
        r"own|local|micro.?batch|each rank|per.?rank|arange|at hand|position in the",
        r"index|number|count|row|global|same times|N\b|ROWS|divid|spread|offset",
    ],
    place=[r"sample_times", r"arange", r"stretch|\bt\b ?="],
    wrong=[
        r"no_sync|sync.{0,20}(missing|early)|all.?reduce.{0,20}(missing|twice)",
        r"(loss|gradient).{0,30}(divisor|divided).{0,30}(own|local) (number|count) of (tokens|masked)|mean of means",
        r"random (number )?(state|generator|seed).{0,40}(differ|advance)|dropout",
        r"wrong rows|same rows|rows? (lost|twice)|weight 1 ?/ ?t.{0,30}missing",
    ],
)
WHY = (
    "Row i of all ten has t from (u + i/10) mod 1. sample_times counts from zero in each micro-batch and divides by its own number of rows (two or one): so rows get u, u + 1/2 or u alone, the same on all ranks and in both "
    "micro-batches. Which tokens are masked and the weight 1/t are then those of another time for nearly all rows (row 0 is right, by chance a few others), on all ranks; after DDP's mean every parameter's gradient "
    "is wrong. Fix: the row's number in the whole batch and the whole number of rows."
)
