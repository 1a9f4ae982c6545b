"""CTC fine-tuning of wav2vec2 (transformers; group norm in the first convolution, as in the base model) under DDP with two micro-batches: waveforms of
unlike length, padded with zeros; normalised by all target letters. After the reports that the base model's output depends on its padding.
"""

import contextlib

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
LENGTHS, LETTERS = [82, 58, 120, 66, 94, 104, 76], [3, 2, 4, 2, 3, 4, 1]
ROWS, LONGEST, VOCABULARY, MICROS = len(LENGTHS), max(LENGTHS), 9, 2


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = Wav2Vec2Config(
            vocab_size=VOCABULARY, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=18,
            hidden_dropout=0.0, activation_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0,
            final_dropout=0.0, layerdrop=0.0, feat_extract_norm="group", conv_dim=(8, 10), conv_kernel=(6, 3),
            conv_stride=(3, 2), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
            mask_time_prob=0.0, mask_feature_prob=0.0, apply_spec_augment=False, pad_token_id=0,
            initializer_range=0.2,
        )  # fmt: skip
        return Wav2Vec2ForCTC(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        mask = torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]
        letters = torch.arange(max(LETTERS)) < torch.tensor(LETTERS)[:, None]
        ids = torch.randint(1, VOCABULARY, letters.shape, generator=g)
        return {
            "wave": (torch.randn(ROWS, LONGEST, generator=g) + 0.4) * mask,
            "mask": mask,
            "labels": ids.masked_fill(~letters, -100),
        }

    def loss_sum(self, model, rows):
        out = model(rows["wave"], attention_mask=rows["mask"].long())
        logp = F.log_softmax(out.logits, -1).transpose(0, 1)
        frames = rows["mask"].sum(1)
        for kernel, stride in ((6, 3), (3, 2)):
            frames = (frames - kernel) // stride + 1
        valid = rows["labels"] >= 0
        loss = F.ctc_loss(
            logp, rows["labels"][valid], frames, valid.sum(1), blank=0, reduction="sum"
        )
        return loss, valid.sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def padded(self, rows):
        return rows

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = (mine["labels"] >= 0).sum()
        dist.all_reduce(count)
        for i in range(MICROS):
            micro = self.padded({k: v.tensor_split(MICROS)[i] for k, v in mine.items()})
            with contextlib.nullcontext() if i == MICROS - 1 else model.no_sync():
                loss, _ = self.loss_sum(model, micro)
                (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    def padded(self, rows):
        longest = int(rows["mask"].sum(1).max())
        return {**rows, "wave": rows["wave"][:, :longest], "mask": rows["mask"][:, :longest]}


EXPECT = dict(
    right=[
        r"forward|goes into|input|norm|statistic",
        r"conv_layers?\.0|feature_extractor|group.?norm|layer_norm|padd|length|longest|shorter|positions|samples|frames",
    ],
    place=[r"feature_extractor|conv_layers|group.?norm|input_values|\bwave\b|padd"],
    wrong=[
        r"(own|local) (count|denominator|divisor|number of letters)",
        r"(never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"goes wrong in .{0,12}(encoder|lm_head|feature_projection|pos_conv)",
        r"gradient of other targets|ctc .{0,20}wrong",
        r"rows? .{0,20}(never read|read twice)|wrong on (all|every) ranks? .{0,20}(all|every) micro",
    ],
)
WHY = (
    "Each micro-batch is cut to its own longest waveform, as a collator with padding='longest' does. The first convolution's group norm takes mean and variance over the whole time axis, padding "
    "included, so every row's features depend on how long its micro-batch is. The single process pads all rows to 120 samples. Only the micro-batch with the longest waveform (row 2, "
    "the second of rank 0) has that length and is right; rank 0's first and all of ranks 1 and 2 go wrong in feature_extractor.conv_layers.0.layer_norm (its input, the convolution, is right where it exists). "
    "Masks, targets, divisor and reduction are right. All ranks must pad to one length (or the norm must leave padding out)."
)
