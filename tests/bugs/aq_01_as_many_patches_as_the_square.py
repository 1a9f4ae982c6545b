"""Fine-tuning a ViT (transformers ViTModel) on images of several shapes in buckets of one shape each (16 x 16, 8 x 32, 32 x 8) under DDP on three ranks, two micro-batches each (no_sync for the first). The learned table of positions is a
square of 4 x 4 patches and is resized to the grid of each bucket (interpolate_pos_encoding). Mean over the classified images of all ranks.

The bug: the table is handed back as it is whenever the number of patches agrees with the table's; that the image is square is not asked. Both long shapes have 16 patches as well (2 x 8 and 8 x 2), so their patches get the places of a 4
x 4 square row by row. As in interpolate_pos_encoding of facebookresearch/dino (issues 8 and 36: only right for square images) before the check for width and height.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import ViTConfig, ViTModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
CLASSES, SHAPES = 5, [(16, 16), (8, 32), (32, 8)]
SHAPE_OF_ROW = [0, 0, 1, 1, 0, 2, 0, 0, 0, 2, 2]
PARTS = [[(0, 2), (2, 4)], [(4, 5), (5, 6)], [(6, 9), (9, 11)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        config = ViTConfig(
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=12,
            image_size=16,
            patch_size=4,
            num_channels=2,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.vit = ViTModel(config, add_pooling_layer=False)
        nn.init.normal_(self.vit.embeddings.position_embeddings, std=0.7)
        nn.init.normal_(self.vit.embeddings.cls_token, std=0.7)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images):
        states = self.vit(images, interpolate_pos_encoding=True).last_hidden_state
        return self.head(states[:, 0])


def resize_places(embeddings):
    """The recipe's own resizing, which saves the interpolation if the sizes agree."""
    right = embeddings.interpolate_pos_encoding

    def places(x, height, width):
        if x.shape[1] == embeddings.position_embeddings.shape[1]:
            return embeddings.position_embeddings
        return right(x, height, width)

    embeddings.interpolate_pos_encoding = places


def bucket_loss(model, rows, shape):
    images = rows["pixels"].unflatten(-1, SHAPES[shape])
    return F.cross_entropy(model(images), rows["label"], reduction="sum")


class Clean:
    by_number = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(SHAPE_OF_ROW)
        return {
            "pixels": torch.randn(rows, 2, 256, generator=g),
            "label": torch.randint(CLASSES, (rows,), generator=g),
            "shape": torch.tensor(SHAPE_OF_ROW),
        }

    def loss_sum(self, model, rows):
        total = 0
        for shape in rows["shape"].unique().tolist():
            chosen = rows["shape"] == shape
            total = total + bucket_loss(model, {k: v[chosen] for k, v in rows.items()}, shape)
        return total, len(rows["label"])

    def distribute(self, model, ctx):
        if self.by_number:
            resize_places(model.vit.embeddings)
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            loss = bucket_loss(model, rows, int(rows["shape"][0]))
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (loss * ctx.world_size / len(batch["label"])).backward()


class Buggy(Clean):
    by_number = True


EXPECT = dict(
    right=[
        r"(?i)forward|output|values?|position|places|interpol",
        r"(?i)embeddings|position|patch|places",
        r"(?i)micro.?batch|rows?|images?|shape|wide|tall|square|ranks?",
    ],
    place=[r"(?i)vit\.embeddings|position_embeddings|interpolate|position"],
    wrong=[
        r"(?i)(not|never) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync.{0,30}(wrong|late|early)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward is right|wrong only in the backward|goes wrong in the backward",
        r"(?i)labels? .{0,20}(is|are) (wrong|of)|other rows|rows? of another",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)(attention|query|key|layernorm).{0,30}forward.{0,15}first|micro.?batch(es)? .{0,20}(lost|dropped)",
    ],
)
WHY = (
    "The forward is wrong in vit.embeddings for the images that are not square: rows 2 and 3 (rank 0, second micro-batch, 8 x 32), row 5 (rank 1, second micro-batch, 32 x 8), rows 9 and 10 (rank 2, second micro-batch, 32 x 8). Their "
    "grids are 2 x 8 and 8 x 2: 16 patches like the table's 4 x 4, and resize_places hands the table back unresized, so the patches get the places of the square read row by row. All first micro-batches are square and right. The patch "
    "projection, the labels, the divisor 11, no_sync and DDP's average are right. Everything behind the embeddings is computed from other values in these micro-batches, so all gradients are wrong (equally on all ranks); "
    "position_embeddings lacks the adjoint of the bicubic resizing there as well. Fix: hand the table back only if height == width too (as transformers does), or compare the two grids."
)
