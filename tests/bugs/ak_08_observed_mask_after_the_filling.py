"""Forecasting with the TimeSeriesTransformer of transformers under DDP on two ranks with two micro-batches each (no_sync for the first). Series have gaps, marked by a special number; a loader replaces them by zero and makes
past_observed_mask, with which the model's scaler takes mean and spread of the observed values only.

The bug: the mask is made after the gaps have been filled, so it says that everything has been observed, and zeros in the gaps count for mean and spread. After gluonts' AddObservedValuesIndicator, which must see the NaNs before they are
filled, and questions on past_observed_mask in huggingface/transformers.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import TimeSeriesTransformerConfig, TimeSeriesTransformerModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
CONTEXT, FUTURE, LAGS, WIDTH, GAP = 6, 3, [1, 2], 8, -99.0
PAST = CONTEXT + max(LAGS)
PARTS = [[(0, 2), (2, 5)], [(5, 8), (8, 9)]]
GAPS = {1: [3, 6], 4: [2, 3, 7], 5: [4], 7: [0, 5]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = TimeSeriesTransformerModel(
            TimeSeriesTransformerConfig(
                prediction_length=FUTURE,
                context_length=CONTEXT,
                lags_sequence=LAGS,
                scaling="std",
                num_time_features=1,
                d_model=WIDTH,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=12,
                decoder_ffn_dim=12,
                dropout=0.0,
                attention_dropout=0.0,
                activation_dropout=0.0,
                encoder_layerdrop=0.0,
                decoder_layerdrop=0.0,
                init_std=0.3,
                use_cache=False,
            )
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, past, mask, past_time, future, future_time):
        out = self.body(
            past_values=past,
            past_observed_mask=mask,
            past_time_features=past_time,
            future_values=future,
            future_time_features=future_time,
        )
        normal = self.head(out.last_hidden_state).squeeze(-1)
        return normal * out.scale + out.loc


def loader(rows, fill_first):
    past = rows["past"]
    if fill_first:
        past = past.masked_fill(past == GAP, 0.0)
        mask = (past != GAP).to(past.dtype)
    else:
        mask = (past != GAP).to(past.dtype)
        past = past.masked_fill(past == GAP, 0.0)
    return past, mask, rows["past_time"], rows["future"], rows["future_time"]


class Clean:
    fill_first = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        n = PARTS[-1][-1][1]
        level = 2 + torch.randn(n, 1, generator=g)
        past = level + torch.randn(n, PAST, generator=g)
        for row, gaps in GAPS.items():
            past[row, gaps] = GAP
        time = torch.arange(PAST + FUTURE).expand(n, -1)[..., None] / 10.0
        return {
            "past": past,
            "past_time": time[:, :PAST].contiguous(),
            "future": level + torch.randn(n, FUTURE, generator=g),
            "future_time": time[:, PAST:].contiguous(),
        }

    def loss_sum(self, model, rows):
        forecast = model(*loader(rows, False))
        return F.smooth_l1_loss(forecast, rows["future"], reduction="sum"), rows["future"].numel()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                forecast = model(*loader(rows, self.fill_first))
                loss = F.smooth_l1_loss(forecast, rows["future"], reduction="sum")
                (loss * ctx.world_size / batch["future"].numel()).backward()


class Buggy(Clean):
    fill_first = True


EXPECT = dict(
    right=[
        r"(?i)rows?|sample|micro.?batch|series",
        r"(?i)input|mask|scaler|past|value_embedding|embedding|body|forward",
        r"(?i)mask|observed|input|differ|other|wrong|scal(e|er|ing)|loc\b",
        r"(?i)\b1\b.{0,60}\b4\b|\b5\b.{0,60}\b7\b|past_observed_mask|observed|mask",
    ],
    place=[r"(?i)mask|scaler|value_embedding|input|observed|body"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted twice|"
        r"no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward is right|wrong only in the backward",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)(future|target|label)s? .{0,20}(is|are) (wrong|shifted)",
        r"(?i)(attention|attn)\S* .{0,20}(computes|forward).{0,20}wrong",
    ],
)
WHY = (
    "Rows 1 and 4 (rank 0, one in each micro-batch), 5 and 7 (rank 1, first micro-batch) have gaps. For them past_observed_mask is all ones instead of zero at the gaps inside the context (the last six of eight places), so the "
    "scaler's loc and scale include the zeros of the gaps: the normalised inputs, the static features and the rescaled forecast are wrong. (Gaps in the first two places, as place 0 of row 7, lie outside the context; row 7 has place "
    "5 too.) The other rows and rank 1's second micro-batch (row 8) are right. The forward goes wrong at the input (mask) of `body`; all gradients are wrong by these four rows' part, the same on both ranks after DDP's average. "
    "Divisor 27, no_sync and reduction are right. Fix: make the mask before the gaps are filled."
)
