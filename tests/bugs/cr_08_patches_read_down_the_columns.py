"""transformers' InternVL (tiny; 36 patches, pixel shuffle to 9 image tokens, Qwen2 as the language
model), data parallel over two ranks (3 and 2 of 5 rows), micro-batches of two, one flat message for
all gradients.

The rank has its own pixel shuffle (one reshape and permute, without two copies).

Bug: the image tokens come out column after column: width and height are not swapped back. This is
`ps_version` v1 of InternVL, whose own code warns that the image is transposed.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from transformers import InternVLConfig, InternVLForConditionalGeneration

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
WORDS, IMAGE, ROWS, TEXT, SIDE, PATCH, TOKENS = 21, 20, 5, 5, 12, 2, 9


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 81)
        vision = dict(
            hidden_size=6,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            image_size=SIDE,
            patch_size=PATCH,
            num_channels=2,
            initializer_range=0.3,
            layer_scale_init_value=0.7,
        )
        text = dict(
            model_type="qwen2",
            vocab_size=WORDS,
            hidden_size=8,
            intermediate_size=10,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            initializer_range=0.3,
            use_cache=False,
        )
        config = InternVLConfig(
            vision_config=vision,
            text_config=text,
            image_token_id=IMAGE,
            image_seq_length=TOKENS,
            tie_word_embeddings=False,
            initializer_range=0.3,
        )
        return InternVLForConditionalGeneration(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 810)
        ids = torch.randint(1, IMAGE, (ROWS, 1 + TOKENS + TEXT), generator=g)
        ids[:, 1 : 1 + TOKENS] = IMAGE
        return {"ids": ids, "image": torch.randn(ROWS, 2, SIDE, SIDE, generator=g)}

    def loss_sum(self, model, rows):
        ids = rows["ids"]
        logits = model(input_ids=ids, pixel_values=rows["image"], use_cache=False).logits
        said = logits[:, TOKENS : TOKENS + TEXT].flatten(0, 1)
        return F.cross_entropy(said, ids[:, 1 + TOKENS :].flatten(), reduction="sum"), len(ids)

    def shuffle(self, vision_features, scale_factor=0.5):
        n, rows, columns, _ = vision_features.shape
        fold = round(1 / scale_factor)
        x = vision_features.reshape(n, rows // fold, fold, columns // fold, fold, -1)
        return x.permute(0, 1, 3, 2, 4, 5).flatten(3)

    def distribute(self, model, ctx):
        model.model.pixel_shuffle = self.shuffle
        return model

    def step(self, model, batch, ctx):
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in own.split(2):
            loss, _ = self.loss_sum(model, {k: v[part] for k, v in batch.items()})
            (loss / ROWS).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        flat = _flatten_dense_tensors(grads)
        dist.all_reduce(flat, group=ctx.group("dp"))
        for grad, whole in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
            grad.copy_(whole)


class Buggy(Clean):
    def shuffle(self, vision_features, scale_factor=0.5):
        n, rows, columns, _ = vision_features.shape
        fold = round(1 / scale_factor)
        x = vision_features.reshape(n, rows // fold, fold, columns // fold, fold, -1)
        return x.permute(0, 3, 1, 2, 4, 5).flatten(3)


EXPECT = dict(
    right=[
        r"shuffle|image (tokens|features)|patch|vision|visual|pixel",
        r"transpos|swap|column|order|permut|width|height|orientation|ps_version",
    ],
    place=[
        r"\bshuffle\b",
        r"pixel_shuffle",
        r"permute",
        r"multi_modal_projector|get_image_features",
    ],
    wrong=[
        r"(missing|not|never|twice).{0,20}(all.?reduc|summed)",
        r"(flat|bucket|unflatten).{0,40}(order|wrong|misplac)",
        r"(image_token|placeholder).{0,30}(wrong|miss|shift)",
        r"label.{0,30}(shift|off.by.one)",
        r"(scale_factor|fold).{0,30}(wrong|inverted)",
    ],
)
WHY = """The pixel shuffle folds 2 x 2 patches into the channels and must leave the image tokens in
reading order (row after row). Buggy.shuffle permutes (0, 3, 1, ..) in place of (0, 1, 3, ..), so
width stands before height: the nine image tokens are transposed, each with right
contents. They take the wrong places in the text (position, causal mask), so loss and all gradients
are wrong. Micro-batches and the flat message are right. Fix: permute(0, 1, 3, 2, 4, 5), that is
swap the two axes back."""
