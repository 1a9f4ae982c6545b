"""Fine-tuning a tiny Wav2Vec2ForCTC on letters under DDP on two ranks (three and two micro-batches of odd size, no_sync before the last) with a communication hook that sums instead of averaging. The CTC loss is taken outside the
model as a sum over utterances; divisor: letters of the whole batch. The blank of the vocabulary is its padding token, the last class; class 0 is the sentence start, which no transcript contains.

The bug: the training loop's call of ctc_loss names no blank, so torch's default 0 (the sentence start) is the blank. After wenet-e2e/wenet PR 2157 (support arbitrary ctc blank id) and SeanNaren/deepspeech.pytorch PR 603 (Add blank
index to ctc loss explicitly).
"""

import contextlib

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
CLASSES, SAMPLES = 7, 61
LETTERS = [3, 5, 2, 4, 1, 3, 2, 5, 4]
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 8), (8, 9)]]


def transcript_loss(model, rows, **extra):
    log_probs = model(input_values=rows["sound"]).logits.log_softmax(-1).transpose(0, 1)
    frames = torch.full((len(rows["letters"]),), len(log_probs))
    return F.ctc_loss(log_probs, rows["letters"], frames, rows["number"], reduction="sum", **extra)


def summed(group, bucket):
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class Clean:
    ctc = {"blank": CLASSES - 1}

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = Wav2Vec2Config(
            vocab_size=CLASSES,
            pad_token_id=CLASSES - 1,
            bos_token_id=0,
            eos_token_id=0,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            conv_dim=(6, 6),
            conv_kernel=(3, 3),
            conv_stride=(2, 2),
            num_feat_extract_layers=2,
            feat_extract_norm="layer",
            do_stable_layer_norm=True,
            num_conv_pos_embeddings=3,
            num_conv_pos_embedding_groups=2,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            feat_proj_dropout=0.0,
            final_dropout=0.0,
            layerdrop=0.0,
            mask_time_prob=0.0,
            mask_feature_prob=0.0,
            apply_spec_augment=False,
            initializer_range=0.5,
        )
        config._attn_implementation = "eager"
        return Wav2Vec2ForCTC(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(LETTERS)
        return {
            "sound": torch.randn(rows, SAMPLES, generator=g),
            "letters": torch.randint(1, CLASSES - 1, (rows, max(LETTERS)), generator=g),
            "number": torch.tensor(LETTERS),
        }

    def loss_sum(self, model, rows):
        loss = transcript_loss(model, rows, blank=model.config.pad_token_id)
        return loss, int(rows["number"].sum())

    def distribute(self, model, ctx):
        model = DistributedDataParallel(model, process_group=ctx.group("dp"))
        model.register_comm_hook(ctx.group("dp"), summed)
        return model

    def step(self, model, batch, ctx):
        letters = int(batch["number"].sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (transcript_loss(model, rows, **self.ctc) / letters).backward()


class Buggy(Clean):
    ctc = {}


EXPECT = dict(
    right=[
        r"(?i)loss|ctc|blank|lm_head|logits|label|target",
        r"(?i)(loss|ctc|logits|lm_head|label|target|blank).{0,160}(wrong|other|differ|not the|unlike|class|index|setting|default|blank)|"
        r"(wrong|other|differ|unlike).{0,160}(loss|ctc|logits|lm_head|label|target|blank)",
    ],
    place=[r"(?i)loss|ctc|lm_head|logits"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync.{0,40}(wrong|missing|too (early|late))|hook.{0,30}(wrong|divides)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"(?i)only (on )?rank [01]\b|rank [01] alone|wrong rows",
        r"(?i)(encoder|feature_extractor|attention|conv)\S* .{0,30}forward.{0,20}wrong|forward goes wrong (first )?(at|in) (the )?(wav2vec2|encoder|feature)",
        r"(?i)detach|recomput|dropout",
    ],
)
WHY = (
    "The model's forward (logits) is right everywhere. The loss is not: in the step F.ctc_loss is called without blank, so class 0 (sentence start) is taken for the blank instead of class 6 (pad_token_id). So the gradient that goes into "
    "the logits is wrong in classes 0 and 6 and in the alignment, in all rows, all micro-batches, both ranks, and with it all parameters' gradients. The letters themselves (1 to 5), lengths, divisor 29, the summing hook and no_sync are "
    "right. Fix: blank=config.pad_token_id."
)
