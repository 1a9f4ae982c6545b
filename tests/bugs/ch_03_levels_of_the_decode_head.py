"""SegFormer (transformers, small config), two stages in a pipeline: the first encoder stage on one
rank, the second with the decode head on the other; rows over dp 2, two micro-batches.

The map that is handed over is both the input of the second encoder stage and the first level of
the decode head. The batch norm of the head is frozen, its affine part is trained.

The bug: the head's fusing convolution expects the levels from the deepest to the first
(``all_hidden_states[::-1]``), but the pipeline stage's own decode concatenates them in the order in
which it made them. All levels have the same width, so every shape fits. After rewrites of
SegFormer's head outside the library (mmseg and transformers order the levels differently, which
the conversion script takes account of).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import SegformerConfig, SegformerForSemanticSegmentation

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 2}}}}

ROWS, HEIGHT, WIDTH, CLASSES = 7, 9, 7, 3
FIRST = (6, 5, 4)


class FrozenBatchNorm(nn.BatchNorm2d):
    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


def levels(head, maps):
    size = maps[0].shape[2:]
    for level, projection in zip(maps, head.linear_projections, strict=True):
        flat = projection(level).transpose(1, 2)
        flat = flat.reshape(*flat.shape[:2], *level.shape[2:])
        yield F.interpolate(flat, size=size, mode="bilinear", align_corners=False)


def finish(head, fused):
    return head.classifier(head.activation(head.batch_norm(head.linear_fuse(fused))))


def decode(head, maps):
    deepest_first = list(levels(head, maps))[::-1]
    return finish(head, torch.cat(deepest_first, dim=1))


def decode_stage(head, maps):
    return finish(head, torch.cat(list(levels(head, maps)), dim=1))


class Clean:
    decode = staticmethod(decode)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(41 + self.seed)
        config = SegformerConfig(
            num_channels=2,
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[6, 9],
            patch_sizes=[3, 3],
            strides=[2, 2],
            num_attention_heads=[2, 3],
            mlp_ratios=[2, 2],
            decoder_hidden_size=5,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
            drop_path_rate=0.0,
            initializer_range=0.3,
            num_labels=CLASSES,
        )
        model = SegformerForSemanticSegmentation(config)
        norm = model.decode_head.batch_norm
        norm.__class__ = FrozenBatchNorm
        norm.running_mean.normal_(0, 0.2)
        norm.running_var.uniform_(0.5, 1.5)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(42 + self.seed)
        return {
            "pixels": torch.randn(ROWS, 2, HEIGHT, WIDTH, generator=g),
            "labels": torch.randint(0, CLASSES, (ROWS, *FIRST[1:]), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(pixel_values=rows["pixels"]).logits
        loss = F.cross_entropy(logits, rows["labels"], reduction="sum")
        return loss, rows["labels"].numel()

    def distribute(self, model, ctx):
        if ctx.coords["pp"] == 0:
            model.decode_head = None
            model.segformer.stages[1] = nn.Identity()
        else:
            model.segformer.stages[0] = nn.Identity()
        return model

    def step(self, model, batch, ctx):
        pipe, data = ctx.group("pp"), ctx.group("dp")
        ranks = dist.get_process_group_ranks(pipe)
        mine = {k: torch.tensor_split(v, 2)[ctx.coords["dp"]] for k, v in batch.items()}
        kept = []
        for pixels, labels in zip(*(torch.tensor_split(v, 2) for v in mine.values()), strict=True):
            if ctx.coords["pp"] == 0:
                first = model.segformer.stages[0](pixels)
                dist.send(first.detach().contiguous(), ranks[1], group=pipe)
                kept.append((first, None))
            else:
                first = pixels.new_empty(pixels.shape[0], *FIRST)
                dist.recv(first, ranks[0], group=pipe)
                first.requires_grad_(True)
                second = model.segformer.stages[1](first)
                logits = self.decode(model.decode_head, [first, second])
                loss = F.cross_entropy(logits, labels, reduction="sum")
                kept.append((first, loss / batch["labels"].numel()))
        for first, loss in kept:
            if loss is None:
                back = torch.empty_like(first, memory_format=torch.contiguous_format)
                dist.recv(back, ranks[1], group=pipe)
                first.backward(back)
            else:
                loss.backward()
                dist.send(first.grad.contiguous(), ranks[0], group=pipe)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=data)


class Buggy(Clean):
    decode = staticmethod(decode_stage)


EXPECT = dict(
    right=[
        r"order|revers|\[::-1\]|swap|exchang|permut|deepest",
        r"level|scale|feature map|concat|\bcat\b|stage|hidden_states|channel|block",
        r"fuse|fusion|head|decode",
    ],
    place=[
        r"decode_stage",
        r"\bdecode\b",
        r"linear_fuse",
        r"decode_head",
        r"torch\.cat",
        r"\blevels\b",
    ],
    wrong=[
        r"(not|never|missing|without).{0,40}(all-?)?reduc",
        r"align_corners|wrong (interpolat|upsampl)",
        r"divis(or|ion)|normali[sz]er|batch[- ]?norm stat",
        r"(gradient|grad).{0,40}(handed|sent) (back|over).{0,40}(lost|overwrit|miss)",
    ],
)

WHY = (
    "linear_fuse was built for the levels from the deepest to the first, as transformers "
    "concatenates all_hidden_states[::-1]; decode_stage concatenates them first to deepest. Each "
    "half of the fusing weight therefore multiplies the other level, without any shape error. "
    "The gradient of linear_fuse has its two column blocks exchanged in effect, and since the "
    "forward changes, all gradients of both stages are wrong; the hand over, the upsampling and "
    "the reduction over dp are right. A right cause says that the order of the levels in front "
    "of linear_fuse is the reverse of what it should be. The fix is to turn the list of levels "
    "round before torch.cat."
)
