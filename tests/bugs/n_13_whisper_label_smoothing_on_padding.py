"""Whisper fine-tuning with a frozen encoder and label smoothing, DDP with a static graph, four ranks. After fairseq and transformers
(LabelSmoother) reports: the smoothing term is not masked at the padding of the labels.
"""

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import WhisperConfig, WhisperForConditionalGeneration

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
ROWS, LENGTH, VOCABULARY, EPSILON, PAD, START = 10, 7, 30, 0.2, 0, 1


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        model = WhisperForConditionalGeneration(
            WhisperConfig(
                vocab_size=VOCABULARY,
                num_mel_bins=6,
                encoder_layers=1,
                decoder_layers=2,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=19,
                decoder_ffn_dim=22,
                d_model=12,
                max_source_positions=9,
                max_target_positions=LENGTH,
                decoder_start_token_id=START,
                pad_token_id=PAD,
                bos_token_id=START,
                eos_token_id=2,
                use_cache=False,
                dropout=0.0,
                attention_dropout=0.0,
                activation_dropout=0.0,
                init_std=0.25,
            )
        )
        model.model.encoder.requires_grad_(False)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        labels = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=g)
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "input_features": torch.randn(ROWS, 6, 18, generator=g),
            "labels": labels.masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    @staticmethod
    def logprobs(model, rows):
        labels = rows["labels"]
        previous = torch.cat([torch.full_like(labels[:, :1], START), labels[:, :-1]], 1)
        out = model(
            input_features=rows["input_features"],
            decoder_input_ids=previous.masked_fill(previous == -100, PAD),
        )
        return out.logits.log_softmax(-1)

    @staticmethod
    def smoothed(logprobs, labels):
        valid = labels != -100
        nll = -logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        uniform = -logprobs.mean(-1)
        return ((1 - EPSILON) * nll * valid).sum() + (EPSILON * uniform * valid).sum()

    def loss_sum(self, model, rows):
        loss = self.smoothed(self.logprobs(model, rows), rows["labels"])
        return loss, (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)

    def label_smoother(self, logprobs, labels):
        return self.smoothed(logprobs, labels)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        loss = self.label_smoother(self.logprobs(model, mine), mine["labels"])
        # DDP averages
        (loss * ctx.world_size / (batch["labels"] != -100).sum()).backward()


class Buggy(Clean):
    def label_smoother(self, logprobs, labels):
        valid = labels != -100
        nll = -logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        uniform = -logprobs.mean(-1)
        return ((1 - EPSILON) * nll * valid).sum() + (EPSILON * uniform).sum()


EXPECT = dict(
    right=[
        r"pad|ignor|mask|-100|not valid|invalid|without (a )?label|unlabel|positions?|tokens?|loss|objective|criterion",
        r"loss|smooth|logit|label|objective|criterion|contribut|counted|included|enter",
    ],
    place=[
        r"logit|proj_out|decoder|head",
        r"loss|label|pad|token|position",
        r"(every|all|each) (param|gradient|rank|weight|tensor)",
    ],
    wrong=[
        r"(not|never) (been )?(all.?)?(reduced|summed)",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"mean of (the )?(rank |ranks' )?means",
        r"(own|local|wrong) (count|denominator|divisor)",
        r"encoder\S* (is|are|has|have) (a )?(wrong|missing)",
        r"(tied|shared) (weight|embedding) .{0,30}(missing|lost|once)",
    ],
)
WHY = (
    "The smoothing term is summed over the padded label positions (-100) too: padding tokens add a loss, and a gradient into the logits, that "
    "should be zero. Count, reduction and the likelihood term are right; every trainable parameter is off, the frozen encoder has no gradient."
)
