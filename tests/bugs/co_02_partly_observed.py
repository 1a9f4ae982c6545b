"""transformers' TimeSeriesTransformerForPrediction on series of two measured quantities (Student-t
head with two dimensions, mean scaling, two lags, gaps in past and future), DistributedDataParallel
over two ranks (3 and 2 of 5 series), two micro-batches each, the first under no_sync.

The step builds the distribution from the model's output and sums the negative log-likelihoods
itself, divided by the number of scored steps of the whole batch. A step of the future is scored if
both quantities were measured (the library takes the minimum of the mask over them).

Bug: the step scores a future step if any of the quantities was measured, so that the zeros which
stand in the gaps are learnt. After masks for multivariate forecasts that were reduced with any().
"""

import contextlib

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import TimeSeriesTransformerConfig, TimeSeriesTransformerForPrediction

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
SERIES, CONTEXT, LAGS, FUTURE, SIZE = 5, 6, [1, 3], 4, 2
PAST = CONTEXT + max(LAGS)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 2)
        config = TimeSeriesTransformerConfig(
            prediction_length=FUTURE,
            context_length=CONTEXT,
            input_size=SIZE,
            lags_sequence=LAGS,
            scaling="mean",
            num_time_features=1,
            d_model=8,
            encoder_layers=1,
            decoder_layers=1,
            encoder_ffn_dim=9,
            decoder_ffn_dim=9,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
            init_std=0.2,
        )
        return TimeSeriesTransformerForPrediction(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 20)
        values = torch.randn(SERIES, PAST + FUTURE, SIZE, generator=g).cumsum(1) + 3.0
        observed = torch.rand(SERIES, PAST + FUTURE, SIZE, generator=g) < 0.75
        values = values * observed
        times = torch.linspace(-1, 1, PAST + FUTURE).repeat(SERIES, 1)[..., None].clone()
        times = times + 0.1 * torch.randn(SERIES, 1, 1, generator=g)
        return {
            "past_values": values[:, :PAST],
            "past_time_features": times[:, :PAST],
            "past_observed_mask": observed[:, :PAST].float(),
            "future_values": values[:, PAST:],
            "future_time_features": times[:, PAST:],
            "future_observed_mask": observed[:, PAST:].float(),
        }

    def loss_sum(self, model, rows):
        scored = rows["future_observed_mask"].amin(-1).sum()
        return model(**rows).loss * scored, scored

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def scored(self, mask):
        return mask.bool().all(-1)

    def step(self, model, batch, ctx):
        dp = ctx.axes["dp"]
        total = self.scored(batch["future_observed_mask"]).sum()
        parts = torch.arange(SERIES).tensor_split(dp)[ctx.coords["dp"]].tensor_split(2)
        for i, rows in enumerate(parts):
            last = i == len(parts) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                part = {k: v[rows] for k, v in batch.items()}
                mask = self.scored(part.pop("future_observed_mask"))
                out = model(**part)
                found = model.module.output_distribution(out.params, out.loc, out.scale)
                surprise = -found.log_prob(part["future_values"])
                (surprise[mask].sum() * dp / total).backward()


class Buggy(Clean):
    def scored(self, mask):
        return mask.bool().any(-1)


EXPECT = dict(
    right=[
        r"mask|observed|missing|gap|unobserved|scored|measured",
        r"\bany\b|\ball\b|\bmin(imum)?\b|amin|partly|partial|both|every (variable|feature|quantity|"
        r"dimension)|at least one|one of|too many|more (steps|positions|elements|entries)|"
        r"(should|must|ought) (not|be) .{0,30}(mask|exclu|count)|unobserved|differ",
        r"loss|count|divisor|denominator|weight|scor|normali[sz]",
    ],
    place=[
        r"\bscored\b",
        r"future_observed_mask",
        r"\.any\(-1\)",
        r"surprise\[mask\]",
        r"\btotal\b",
    ],
    wrong=[
        r"past_observed_mask.{0,40}(wrong|missing|ignored)",
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"no_sync.{0,40}(wrong|missing|last)",
        r"(loc|scale).{0,30}(missing|not passed|wrong)",
        r"uneven.{0,40}(rows|series)",
        r"(count|normali[sz]|divisor|denominator).{0,30}(\blocal\b|\bown\b|per.?rank|micro)",
    ],
)
WHY = """The library weighs each future step by the minimum of future_observed_mask over the
quantities: it counts only if all were observed. Buggy.scored reduces the mask with any(-1), so that
steps with one gap are scored as well (the gap holds a zero, which becomes a target), and they are
in the divisor too. All ranks do the same; reduction and forward are right. A right cause says that
the mask of the loss is taken with any / keeps partly observed steps. Fix: all(-1)."""
