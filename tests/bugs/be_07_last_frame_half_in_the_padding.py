"""Emotion from speech: a small random WavLMModel of transformers with mean pooling over the frames and a linear classifier, DDP on three ranks, two micro-batches each (no_sync for the first). Utterances are padded to one length; the
pooling leaves out the frames of the padding.

The bug: the frames of an utterance are counted by folding the padding mask of the samples into the frames, and a frame counts as long as one of its samples is speech; the convolutions give fewer complete frames
(`_get_feat_extract_output_lengths`). A frame or two that lies in the padding enters the mean. After microsoft/UniSpeech issue 24 (Bug in WavLM?), padding_mask.all(-1) where any(-1) is meant.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import WavLMConfig, WavLMModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
SAMPLES, CLASSES, WIDTH = 49, 4, 8
LENGTHS = [49, 20, 31, 26, 43, 38, 22, 49, 34, 29, 44]
PARTS = [[(0, 2), (2, 4)], [(4, 5), (5, 8)], [(8, 10), (10, 11)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        config = WavLMConfig(
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=12,
            conv_dim=(6, 6),
            conv_kernel=(4, 3),
            conv_stride=(3, 2),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            num_buckets=8,
            max_bucket_distance=16,
            feat_extract_norm="layer",
            do_stable_layer_norm=True,
            initializer_range=0.3,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            feat_proj_dropout=0.0,
            final_dropout=0.0,
            layerdrop=0.0,
            mask_time_prob=0.0,
            mask_feature_prob=0.0,
            apply_spec_augment=False,
        )
        self.speech = WavLMModel(config)
        self.classify = nn.Linear(WIDTH, CLASSES)
        self.exact = True

    def valid_frames(self, speech_mask, frames):
        if self.exact:
            count = self.speech._get_feat_extract_output_lengths(speech_mask.sum(1))
            return torch.arange(frames) < count[:, None]
        per_frame = speech_mask.shape[1] // frames
        return speech_mask[:, : frames * per_frame].unflatten(1, (frames, per_frame)).any(2)

    def forward(self, wave, length):
        speech_mask = torch.arange(wave.shape[1]) < length[:, None]
        hidden = self.speech(wave, attention_mask=speech_mask.long()).last_hidden_state
        valid = self.valid_frames(speech_mask, hidden.shape[1])[..., None]
        pooled = (hidden * valid).sum(1) / valid.sum(1)
        return self.classify(pooled)


class Clean:
    exact = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        length = torch.tensor(LENGTHS)
        wave = torch.randn(len(LENGTHS), SAMPLES, generator=g)
        return {
            "wave": wave * (torch.arange(SAMPLES) < length[:, None]),
            "length": length,
            "label": torch.randint(CLASSES, (len(LENGTHS),), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["wave"], rows["length"])
        return F.cross_entropy(logits, rows["label"], reduction="sum"), len(rows["label"])

    def distribute(self, model, ctx):
        model.exact = self.exact
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss, _ = self.loss_sum(model, rows)
                (loss * ctx.world_size / len(batch["label"])).backward()


class Buggy(Clean):
    exact = False


EXPECT = dict(
    right=[
        r"(?i)pool|mask|frame|valid|length|padd|classify|mean",
        r"(?i)forward|value|input|mask|pool|frame|padd|length",
        r"(?i)row|padd|length|mask|frame|short|valid|classify",
    ],
    place=[r"(?i)classify|pool|valid|frame|mask|Net\b|exact"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|no_sync.{0,40}(wrong|missing)",
        r"(?i)mean of means|wrong divisor|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|stale|left over",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)speech\.(encoder|feature_extractor|feature_projection)[\w.]* .{0,25}(goes wrong|is wrong) in the forward|attention mask .{0,20}wrong in the encoder",
        r"(?i)labels? .{0,20}(is|are) wrong|dropout",
    ],
)
WHY = (
    "Net.valid_frames with exact False folds the sample mask into the 7 frames (7 samples per frame) and keeps a frame if any of its samples is speech, i.e. ceil(length / 7) frames; the convolutions (kernel 4 stride 3, kernel 3 stride 2) give "
    "((length - 4) // 3 + 1 - 3) // 2 + 1 frames, fewer for most lengths below the full one. For these rows the mean over the frames has one frame or more of the padding in the numerator and the denominator. Rows whose two counts "
    "agree (rows 0 and 7 of full length 49: 7 frames, row 8 of length 34: 5) are right. WavLM itself gets the sample mask and is right; the forward goes wrong between its "
    "output and `classify` (its input), on all ranks and micro-batches that have such rows. All gradients are wrong. Fix: count = model._get_feat_extract_output_lengths(lengths)."
)
