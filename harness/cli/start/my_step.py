"""A training step that sumgrad checks: `sumgrad run my_step.yaml`. Put yours in its place.

The model, the batch and the loss are told once, for one process; `distribute` and `step` are what
your trainer does on many. Every rank's gradient is compared with the one process's.
"""

import torch
from sumgrad.convention import ddp_sum_hook, global_count
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

ROWS, LENGTH, VOCABULARY = 11, 9, 31  # a number of rows that no number of ranks divides


class MyStep:
    def build(self):
        """The model, with the same weights wherever it is called."""
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Embedding(VOCABULARY, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, VOCABULARY)
        )

    def batch(self):
        """The full batch, rows first. Rows of unequal length show wrong averages."""
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        lengths = torch.randint(2, LENGTH + 1, (ROWS,), generator=generator)
        labels = tokens[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths[:, None], -100)
        return {"tokens": tokens[:, :-1], "labels": labels}

    def loss_sum(self, model, rows):
        """The loss of these rows in one process: its SUM, and how many tokens that are."""
        labels = rows["labels"].flatten()
        logits = model(rows["tokens"]).flatten(0, 1)
        return cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()

    def distribute(self, model, ctx):
        """What your trainer does to the model. Here DDP, told to sum: by itself it averages."""
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(None, ddp_sum_hook)
        return ddp

    def step(self, model, batch, ctx):
        """This rank's step, up to reduced gradients: no optimizer, no clipping."""
        mine = {name: rows.tensor_split(ctx.world_size)[ctx.rank] for name, rows in batch.items()}
        total, count = self.loss_sum(model, mine)
        (total / global_count(count)).backward()  # the tokens of all ranks
