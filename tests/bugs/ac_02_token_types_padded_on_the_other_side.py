"""Finetuning of Gemma 3 with images (its decoder, a Siglip tower and the projector, all trained) under FSDP2 on two ranks, sum of gradients, two micro-batches each. The collator pads the rows of a micro-batch to their longest, on the left, as the processor of the model does. `token_type_ids` say which tokens
are those of the image: these see one another in both directions, all others are causal.

The bug: the collator pads ids, mask and labels on the left, but token_type_ids with pad_sequence, on the right. In every row that is shorter than the longest of its micro-batch the tokens of the image are sought too early. Origin: reports at huggingface/transformers and huggingface/trl on collators for Gemma 3 and PaliGemma which drop
token_type_ids or pad them otherwise than input_ids.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, WORDS, MICRO, IGNORE = 9, 29, 2, -100
PAD, IMAGE, BEGIN, END = 0, 26, 27, 28
SOFT, PIXELS = 4, 8  # tokens of an image, its height and width
LONGEST = 13


def pad(rows, value, width, side):
    """Rows (tensors of their own length) to one tensor."""
    out = torch.full((len(rows), width), value)
    for i, row in enumerate(rows):
        if side == "left":
            out[i, width - len(row) :] = row
        else:
            out[i, : len(row)] = row
    return out


class Clean:
    types_side = "left"

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        text = dict(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=20,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
            max_position_embeddings=32,
            initializer_range=0.3,
            pad_token_id=PAD,
        )
        vision = dict(
            model_type="siglip_vision_model",
            hidden_size=12,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=PIXELS,
            patch_size=2,
            vision_use_head=False,
        )
        model = Gemma3ForConditionalGeneration(
            Gemma3Config(
                text_config=text,
                vision_config=vision,
                mm_tokens_per_image=SOFT,
                image_token_index=IMAGE,
                boi_token_index=BEGIN,
                eoi_token_index=END,
                attn_implementation="eager",
            )
        )
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.3)
        return model

    def batch(self):
        """Each row: some words, the image, more words; kept at the left of LONGEST places."""
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.full((ROWS, LONGEST), PAD)
        length = torch.empty(ROWS, dtype=torch.long)
        for i in range(ROWS):
            before, after = (int(torch.randint(1, high, (), generator=g)) for high in (4, 6))
            words = torch.randint(1, IMAGE, (before + after,), generator=g)
            picture = torch.tensor([BEGIN, *[IMAGE] * SOFT, END])
            row = torch.cat([words[:before], picture, words[before:]])[:LONGEST]
            ids[i, : len(row)], length[i] = row, len(row)
        pixels = torch.randn(ROWS, 3, PIXELS, PIXELS, generator=g)
        return {"ids": ids, "length": length, "pixels": pixels}

    @staticmethod
    def collate(rows, types_side="left"):
        texts = [row[:n] for row, n in zip(rows["ids"], rows["length"], strict=True)]
        labels = [t.masked_fill(t >= IMAGE, IGNORE) for t in texts]
        for row in labels:
            row[0] = IGNORE  # nothing stands before it
        width = int(rows["length"].max())
        return {
            "input_ids": pad(texts, PAD, width, "left"),
            "attention_mask": pad([torch.ones_like(t) for t in texts], 0, width, "left"),
            "token_type_ids": pad([(t == IMAGE).long() for t in texts], 0, width, types_side),
            "pixel_values": rows["pixels"],
        }, pad(labels, IGNORE, width, "left")

    @staticmethod
    def token_loss(model, inputs, labels):
        logits = model(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
        labels = labels[:, 1:].flatten()
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
        return loss, (labels != IGNORE).sum()

    def loss_sum(self, model, rows):
        loss, count = self.token_loss(model, *self.collate(rows))
        return loss, int(count)

    def distribute(self, model, ctx):
        towers = model.model.vision_tower, *model.model.language_model.layers
        for part in (*towers, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        parts = [{k: v.tensor_split(MICRO)[m] for k, v in mine.items()} for m in range(MICRO)]
        parts = [self.collate(rows, self.types_side) for rows in parts]
        count = sum((labels[:, 1:] != IGNORE).sum() for _, labels in parts)
        dist.all_reduce(count, group=ctx.group("dp"))
        for m, (inputs, labels) in enumerate(parts):
            model.set_requires_gradient_sync(m == MICRO - 1)
            (self.token_loss(model, inputs, labels)[0] / count).backward()


class Buggy(Clean):
    types_side = "right"


EXPECT = dict(
    right=[
        r"(?i)token_type|mask|attention|attend|forward|layers\.0|padd|image",
        r"(?i)token_type|mask|attend|bidirection|causal|sees|padd|order|position|side|forward|first wrong|input",
    ],
    place=[r"(?i)token_type|mask|attention|layers\.0|self_attn|attend|collat"],
    wrong=[
        r"(?i)forward (is|values? (are|is)) right|forward .{0,12}agrees",
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|(reduced|summed) (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their|the) own|number of rows|wrong normali[sz]er",
        r"(?i)labels? (is|are) (shifted|wrong|other)|targets? (is|are) (wrong|other|shifted)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)goes wrong in .{0,40}(vision_tower|projector|embed_tokens)|first wrong .{0,40}(vision_tower|projector|embed_tokens)",
        r"(?i)backward of \S+ is wrong|wrong adjoint",
    ],
)
WHY = (
    "token_type_ids are padded on the right while everything else is padded on the left, so in a row with n padding tokens the ones stand n places before the tokens of the image. The attention mask made of them lets words, BEGIN and the first of the tokens of the image see one another in both directions and makes the others of the image causal. "
    "Only rows that are shorter than the longest row of their micro-batch; the longest ones are right. With seed 0 the lengths are 13, 11, 9 and 9, 11 on rank 0, 10, 10 and 11, 9 on rank 1: rows 1, 2, 3 (rank 0) and 8 (rank 1, second micro-batch only) are wrong. The forward goes wrong in the attention of the first decoder layer (the Siglip tower, the projector and the embeddings are right, and so are the input ids, the attention_mask, the labels, the count). "
    "The gradients of all parameters are wrong (decoder, projector, tower), equal on both ranks' shards of one sum. Reduction, accumulation, divisor are right. Fix: pad token_type_ids on the left like input_ids."
)
