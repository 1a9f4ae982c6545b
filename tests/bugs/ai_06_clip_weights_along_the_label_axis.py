"""Audio tagging (AudioSet recipe): a tiny Audio Spectrogram Transformer (transformers, from a config) with four labels per clip, DDP on three ranks with two micro-batches each (no_sync for the first), four clips each and in two of them
a single one. Every clip has a weight (rare sound events weigh more). The loss is the sum of weight times binary cross entropy over clips and labels, divided by the number of clips on all ranks.

The bug: the weights of the clips, a vector of the size of the micro-batch, are given to binary_cross_entropy_with_logits as they are ("a tensor of size nbatch"). They are broadcast along the last axis, the labels; with four clips and
four labels nothing complains. As in pytorch/pytorch issue 25174 (BCEWithLogitsLoss expects wrong shape of weight), also 5157 and 68780.
"""

import contextlib

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import ASTConfig, ASTForAudioClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
FRAMES, BINS, LABELS = 12, 8, 4
PARTS = [[(0, 4), (4, 8)], [(8, 12), (12, 13)], [(13, 14), (14, 18)]]


def losses(model, rows, flat):
    scores = model(input_values=rows["sound"]).logits
    weight = rows["weight"].to(scores.dtype)
    return F.binary_cross_entropy_with_logits(
        scores,
        rows["tags"].to(scores.dtype),
        weight=weight if flat else weight[:, None],
        reduction="sum",
    )


class Clean:
    flat = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        net = ASTForAudioClassification(
            ASTConfig(
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=12,
                layer_norm_eps=1e-5,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                initializer_range=0.3,
                patch_size=4,
                frequency_stride=4,
                time_stride=4,
                max_length=FRAMES,
                num_mel_bins=BINS,
                num_labels=LABELS,
                attn_implementation="eager",
            )
        )
        embeddings = net.audio_spectrogram_transformer.embeddings
        with torch.no_grad():
            embeddings.cls_token.normal_()
            embeddings.distillation_token.normal_()
            embeddings.position_embeddings.normal_(std=0.5)
        return net

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        return {
            "sound": torch.randn(rows, FRAMES, BINS, generator=g),
            "tags": torch.randint(2, (rows, LABELS), generator=g),
            "weight": torch.rand(rows, generator=g) * 3 + 0.25,
        }

    def loss_sum(self, model, rows):
        return losses(model, rows, False), len(rows["sound"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = losses(model, rows, self.flat) * ctx.world_size / len(batch["sound"])
                loss.backward()


class Buggy(Clean):
    flat = True


EXPECT = dict(
    right=[
        r"(?i)weigh\w*|factor|coefficient|scal\w*|multipl\w*",
        r"(?i)loss|label|column|class|element|logits|classifier|output|rows?\b|clips?",
        r"(?i)wrong|differ\w*|other|not (the )?(own|right|same)|axis|broadcast|foreign"
        r"|swapped|transposed|instead|each",
    ],
    place=[
        r"(?i)loss|weight|logits|classifier|label|output gradient|gradient of the (output"
        r"|logits)|entropy"
    ],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward|wrong input",
        r"(?i)(never|not) (been )?(all.?)?reduced|reduced (twice|again)|summed (twice|again)",
        r"(?i)mean of means|divi(ded|des) by (its|their) own|wrong number of (rows|clips)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)"
        r"|only the last micro.?batch",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)layer\.0|encoder.{0,40}(backward|forward) (is|goes) wrong",
        r"(?i)single.{0,20}(clip|row)s? .{0,20}(is|are) wrong|rows? (12|13)\b.{0,30}wrong",
    ],
)
WHY = (
    "In the four micro-batches of four clips (rank 0: rows 0-3 and 4-7; rank 1: rows 8-11; rank 2: rows 14-17) the loss element of clip i and label j is multiplied by the weight of clip j of the micro-batch instead of that of "
    "clip i. So every clip of such a micro-batch has the same four weights, one per label column. The single-clip micro-batches (row 12 on rank 1, row 13 on rank 2) are right, since one weight is broadcast to all labels. "
    "Forward and logits are right; the gradient of the loss at the logits is wrong, elementwise by the factor w_j / w_i, and with it all parameters (after DDP's average equally on all ranks); each row of the classifier's "
    "gradient is scaled by label as well, so it is no common factor. Divisor 18, no_sync and reduction are right. Fix: weight[:, None]."
)
