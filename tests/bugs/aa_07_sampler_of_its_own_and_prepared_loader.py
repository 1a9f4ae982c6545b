"""Image classification with transformers' ViTForImageClassification and accelerate: a DataLoader prepared by the accelerator, batches of two, one optimizer step over the pass with `accumulate`, two ranks. The loss is a sum divided by the size of
the data set; nothing is padded (even_batches=False).

The bug: the script was moved from plain torch, and its `DistributedSampler` stayed. accelerate's prepare_data_loader shards the batches of whatever sampler it finds: each rank gets every second batch of its own half. Origin: huggingface/accelerate
threads on DistributedSampler with accelerator.prepare (data sharded twice); the guide tells to remove the sampler.
"""

import os

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import ViTConfig, ViTForImageClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, SIZE, PATCH, CLASSES, EACH = 11, 8, 4, 5, 2
MICRO = 3  # batches of a rank in a pass: ceil(ROWS / EACH) / ranks


class Images(Dataset):
    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return len(self.batch["label"])

    def __getitem__(self, i):
        return {k: v[i] for k, v in self.batch.items()}


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return ViTForImageClassification(
            ViTConfig(
                hidden_size=12,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=18,
                image_size=SIZE,
                patch_size=PATCH,
                num_channels=3,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                initializer_range=0.2,
                num_labels=CLASSES,
                attn_implementation="eager",
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "pixels": torch.randn(ROWS, 3, SIZE, SIZE, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        dtype = next(model.parameters()).dtype
        logits = model(pixel_values=rows["pixels"].to(dtype)).logits
        return F.cross_entropy(logits, rows["label"], reduction="sum"), len(rows["label"])

    def distribute(self, model, ctx):
        os.environ.update(
            {"RANK": str(ctx.rank), "LOCAL_RANK": str(ctx.rank), "WORLD_SIZE": str(ctx.world_size)}
        )
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=MICRO,
            dataloader_config=DataLoaderConfiguration(even_batches=False),
        )
        return self.accelerator.prepare_model(model)

    def sampler(self, images, ctx):
        return None

    def step(self, model, batch, ctx):
        images = Images(batch)
        loader = self.accelerator.prepare_data_loader(
            DataLoader(images, batch_size=EACH, sampler=self.sampler(images, ctx))
        )
        for rows in loader:
            with self.accelerator.accumulate(model):
                loss, _ = self.loss_sum(model, rows)
                # accelerate divides by MICRO, DDP by the ranks
                self.accelerator.backward(loss * MICRO * ctx.world_size / len(images))


class Buggy(Clean):
    def sampler(self, images, ctx):
        return DistributedSampler(images, num_replicas=ctx.world_size, rank=ctx.rank, shuffle=False)


EXPECT = dict(
    right=[
        r"(?i)rows?|samples?|data|examples?",
        r"(?i)lost|missing|never read|not read|left out|dropped|skipp|without|no part|absent|do(es)? not (contribute|arrive|count)|coefficient (of )?0|weight (of )?0|only .{0,40}read|by no rank|by none|no rank reads|unread|are not",
    ],
    place=[r"(?i)rows?|samples?|data|loader|batch"],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|(reduced|summed) (twice|again)",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)divided by (its|their) own|divisor is wrong|wrong divisor",
        r"(?i)targets? (is|are) (wrong|other)",
        r"(?i)rows? .{0,30}read twice|rows? .{0,20}counted (twice|again)",
    ],
)
WHY = (
    "The DistributedSampler gives rank 0 rows 0,2,4,6,8,10 and rank 1 rows 1,3,5,7,9 and, to make it even, 0. prepare_data_loader takes these batches for those of the whole data set and deals them out again: rank 0 gets its batches 0 and 2 (rows 0,2 and 8,10), rank 1 its batch 1 (rows 5,7). "
    "Rows 1, 3, 4, 6 and 9 are read by no rank; rows 0, 2, 5, 7, 8, 10 contribute once, with their right weight (1/11). The gradient on both ranks is exactly that of these six rows / 11, in all parameters (about 0.42 of the right one along it, seed 0). Forward, divisor, scale and DDP's reduction (in the last batch of each rank) are right. Fix: leave the sampler away."
)
