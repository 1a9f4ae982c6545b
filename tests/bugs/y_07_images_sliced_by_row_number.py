"""A small LLaVA from transformers, DDP of three, rows with one to three images each. The images of a rank's rows lie packed one after the other in `pixel_values`, as the processor delivers them; the rank cuts its rows into micro-batches of two and takes
the images that belong to them.

The bug: the cut through `pixel_values` starts at the number of the micro-batch's first ROW, where it should start at the number of images before that row. Number and shape are right, so nothing complains: image features are scattered into the places of other images.
huggingface/trl PR #6570 (GRPO/RLOO: pixel_values are indexed by image but were cut by sample), PR #6619 and issue #4061 (by tile); the older PR #4113 for several images to a prompt.
"""

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
IMAGES = [2, 1, 3, 1, 1, 2, 3, 1, 3, 1, 2]
WORDS_OF_ROW = [4, 6, 3, 5, 7, 4, 3, 6, 4, 5, 3]
ROWS, MOST, PLACES, WORDS, IMAGE, PAD = len(IMAGES), max(IMAGES), 4, 17, 15, 16
WIDTH = max(PLACES * i + w for i, w in zip(IMAGES, WORDS_OF_ROW))


def target_tokens(rows):
    return (rows["labels"][:, 1:] != -100).sum()


def packed(rows):
    """All images of these rows, one after the other."""
    return rows["images"][torch.arange(MOST) < rows["image_count"][:, None]]


def loss_of(model, rows, pixel_values):
    logits = model(
        input_ids=rows["ids"], attention_mask=rows["mask"], pixel_values=pixel_values
    ).logits
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1),
        rows["labels"][:, 1:].flatten(),
        ignore_index=-100,
        reduction="sum",
    )


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        vision = CLIPVisionConfig(
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
            projection_dim=8,
        )
        text = LlamaConfig(
            vocab_size=WORDS,
            hidden_size=12,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=3,
            initializer_range=0.3,
            tie_word_embeddings=False,
            use_cache=False,
        )
        model = LlavaForConditionalGeneration(
            LlavaConfig(
                vision_config=vision,
                text_config=text,
                image_token_id=IMAGE,
                vision_feature_layer=-1,
                tie_word_embeddings=False,
            )
        )
        model.set_attn_implementation("eager")
        for name, p in model.named_parameters():
            if "post_layernorm" in name:
                p.requires_grad_(False)
            elif "vision" in name and p.ndim > 1:
                torch.nn.init.normal_(p, std=0.3)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(IMAGE, (ROWS, WIDTH), generator=g)
        images, words = torch.tensor(IMAGES)[:, None], torch.tensor(WORDS_OF_ROW)[:, None]
        at = torch.arange(WIDTH)
        ids = torch.where((at >= 1) & (at < 1 + PLACES * images), IMAGE, ids)
        there = at < PLACES * images + words
        ids = ids.masked_fill(~there, PAD)
        return {
            "ids": ids,
            "mask": there.long(),
            "labels": ids.masked_fill((ids == IMAGE) | ~there, -100),
            "images": torch.randn(ROWS, MOST, 3, 8, 8, generator=g),
            "image_count": torch.tensor(IMAGES),
        }

    def loss_sum(self, model, rows):
        return loss_of(model, rows, packed(rows)), target_tokens(rows)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def first_image(self, mine, first_row):
        return mine["image_count"][:first_row].sum()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        pixel_values = packed(mine)
        for first in range(0, len(mine["ids"]), 2):
            rows = {k: v[first : first + 2] for k, v in mine.items()}
            start = self.first_image(mine, first)
            own = pixel_values[start : start + rows["image_count"].sum()]
            model.require_backward_grad_sync = first + 2 >= len(mine["ids"])
            (loss_of(model, rows, own) * ctx.world_size / target_tokens(batch)).backward()


class Buggy(Clean):
    def first_image(self, mine, first_row):
        return first_row


EXPECT = dict(
    right=[
        r"image|pixel|vision|row|batch|data|input|rows",
        r"wrong|other|differ|foreign|mismatch|misalign|shift|slice|index|read|not the|first wrong|goes wrong|never|twice|repeated",
        r"image|pixel|vision|input|micro.?batch|embedding",
    ],
    place=[r"image|pixel|vision|patch|micro.?batch|input"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"(reduced|summed|added) (twice|again)",
        r"each rank .{0,20}own (count|number|denominator)",
        r"micro.?batch\S* .{0,20}(lost|dropped|overwritten)",
        r"pure(ly)? (a )?(scale|factor)|by one (and the same )?factor",
        r"first micro.?batch\S* .{0,30}wrong",
    ],
)
WHY = (
    "In the second micro-batch of each rank (its rows 2 and 3 of the rank: global rows 2-3, 6-7 and 10) the images begin at packed image number 2 of the rank; right would be the number of images in its first two rows: 3 on ranks 0 and 1, 4 on rank 2. "
    "So these rows see images that begin one or two places too early: the first of them belongs to an earlier row (which is used again), and the last images of the rank are not used at all. The first "
    "micro-batch of each rank is right. The forward is wrong from the vision tower's patch embedding on (the input, not the module); ids, labels, masks, token counts, the division and the reduction are right. All parameters' gradients are affected, on all ranks alike after the average. The fix is to cut "
    "at the cumulated image counts, as torch.split(pixel_values, num_images)."
)
