"""Supervised fine-tuning of a Qwen2-VL text model (transformers) with image tokens under FSDP2 on two ranks, two micro-batches of three rows each. Its rotary embedding takes three positions per token (time, height, width) in a tensor of shape
(3, rows, length). The data loader cuts everything along the first dimension, so the collator keeps the positions as (rows, 3, length), and the step must turn them.

The bug: the step hands them over unturned. With micro-batches of any other size the model would refuse them; with exactly three rows the shape (3, 3, length) fits, and rows are read as axes: row r is given, as time, height and width, the r-th
axis of rows 0, 1 and 2 of its micro-batch. After verl-project/verl PR #3653 (position_ids of Qwen2-VL, (batch, 3, length) against (3, batch, length)) and NVIDIA-NeMo/Automodel PR #1482 (mRoPE positions cut along the wrong dimension).
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig

TOPOLOGY = {"pools": {"sft": {"axes": {"dp": 2}}}}
LENGTH, WORDS, WIDTH, PATCH, MICRO = 11, 20, 16, 5, 3
ROWS = 12


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        config = Qwen2VLTextConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=20,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            initializer_range=0.25,
            use_sliding_window=False,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 50.0,
                "mrope_section": [1, 1, 2],
            },
            attn_implementation="eager",
        )
        self.model = modeling_qwen2_vl.Qwen2VLTextModel(config)
        self.merger = nn.Linear(PATCH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids, patch, image, position_ids):
        embeds = torch.where(image[..., None], self.merger(patch), self.model.embed_tokens(ids))
        return self.lm_head(
            self.model(
                inputs_embeds=embeds, position_ids=position_ids, use_cache=False
            ).last_hidden_state
        )


def layout(before, high, wide):
    """Positions (3, LENGTH) of a row with `before` text tokens, an image of high x wide tokens and text to the end."""
    text = torch.arange(before)
    cell = torch.arange(high * wide)
    grid = torch.stack([torch.zeros_like(cell), cell // wide, cell % wide]) + before
    after = torch.arange(LENGTH - before - high * wide) + before + max(high, wide)
    return torch.cat([text.expand(3, -1), grid, after.expand(3, -1)], 1)


def loss_of(logits, labels):
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


class Clean:
    turn = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        shapes = [
            (1, 2, 3),
            (3, 1, 4),
            (2, 3, 2),
            (0, 2, 2),
            (4, 1, 3),
            (1, 4, 1),
            (2, 2, 3),
            (0, 3, 2),
            (3, 2, 2),
            (1, 1, 5),
            (2, 4, 1),
            (1, 3, 2),
        ]
        image = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
        for row, (before, high, wide) in enumerate(shapes):
            image[row, before : before + high * wide] = True
        ids = torch.randint(WORDS, (ROWS, LENGTH), generator=g)
        labels = torch.cat(
            [ids[:, 1:].masked_fill(image[:, 1:], -100), torch.full((ROWS, 1), -100)], 1
        )
        return {
            "ids": ids,
            "labels": labels,
            "image": image,
            "patch": torch.randn(ROWS, LENGTH, PATCH, generator=g),
            "position": torch.stack([layout(*s) for s in shapes]),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], rows["patch"], rows["image"], rows["position"].transpose(0, 1))
        return loss_of(logits, rows["labels"]), int((rows["labels"] != -100).sum())

    def distribute(self, model, ctx):
        for layer in model.model.layers:
            fully_shard(layer, mesh=ctx.mesh)
        return fully_shard(model, mesh=ctx.mesh)

    def step(self, model, batch, ctx):
        tokens = int((batch["labels"] != -100).sum())
        share = ROWS // ctx.world_size
        for start in range(ctx.rank * share, (ctx.rank + 1) * share, MICRO):
            part = {k: v[start : start + MICRO] for k, v in batch.items()}
            position = part["position"].transpose(0, 1) if self.turn else part["position"]
            logits = model(part["ids"], part["patch"], part["image"], position)
            (loss_of(logits, part["labels"]) * ctx.world_size / tokens).backward()


class Buggy(Clean):
    turn = False


EXPECT = dict(
    right=[
        r"(?i)position|rotary|rope|attention|attn",
        r"(?i)position|axis|axes|transpos|rows?|forward|input|other row|mixed|order|layout",
        r"(?i)wrong|other|transpos|swap|exchang|mix|foreign|differ|not (the )?(same|right)|permut|goes off|deviat|taken for",
    ],
    place=[r"(?i)position|rotary|rope|attention|attn|layers\.0"],
    wrong=[
        r"(?i)not (been )?(all.?|reduce.?scatter)?reduced|reduced twice|summed twice|counted twice",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward is right|wrong only in the backward",
        r"(?i)labels? .{0,20}(is|are) (wrong|shifted)|image tokens .{0,30}(wrong|dropped)|mask.{0,20}(wrong|missing)",
        r"(?i)rows? .{0,20}(never read|read twice|dropped)|micro.?batch.{0,20}(lost|dropped|overwritten)|only (on )?rank [01]\b",
        r"(?i)embed_tokens.{0,30}(forward|output).{0,20}wrong|merger.{0,30}(forward|output).{0,20}wrong",
    ],
)
WHY = (
    "In each micro-batch of three rows, on both ranks, position_ids[axis, row] is read as position_ids[row, axis]: row r rotates with the r-th axis of rows 0, 1, 2 of the same micro-batch as its time, height and width. Embeddings and image features "
    "are right, the forward first goes wrong in the rotary embedding, that is in the attention of layer 0 (q and k are right, the rotated ones and with them the scores are not), from which loss and nearly all gradients are wrong in direction. "
    "(A text token whose three rows' positions agree is rotated right.) Ids, labels, image mask, causal mask, divisor and FSDP's reduction are right. Fix: position.transpose(0, 1) before the model."
)
