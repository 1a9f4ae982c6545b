"""Several forwards, then their backwards: a GPT-2 classifier of transformers under DDP runs the forward of three micro-batches inside no_sync, keeps the losses and walks back from the last to the first (the
newest graph is freed first). Accelerator.trigger_sync_in_backward of accelerate arms DDP's reducer for the one backward that is to reduce. Two ranks.

The bug: the reducer is armed at the micro-batch with the highest number, as in a loop that runs forwards; but the loop runs backwards, so that this is the first of the three. After accelerate's
documentation of trigger_sync_in_backward ("multiple forwards, one synchronisation") and the GradCache-like loops that use it.
"""

import contextlib

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2ForSequenceClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, LENGTH, WORDS, LABELS, MICRO = 7, 5, 15, 3, 3


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = GPT2Config(
            vocab_size=WORDS,
            n_positions=LENGTH,
            n_embd=8,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            num_labels=LABELS,
            pad_token_id=0,
            initializer_range=0.3,
            attn_implementation="eager",
            use_cache=False,
        )
        return GPT2ForSequenceClassification(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(1, WORDS, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(LABELS, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"]).logits
        return F.cross_entropy(logits, rows["labels"], reduction="sum"), len(logits)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def forward_all(self, model, parts):
        losses = []
        with model.no_sync():
            for part in parts:
                losses.append(self.loss_sum(model, part)[0])
        return losses

    def backward_all(self, model, losses, scale):
        for i in reversed(range(len(losses))):
            arm = i == 0
            with Accelerator.trigger_sync_in_backward(model) if arm else contextlib.nullcontext():
                (losses[i] * scale).backward()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = torch.tensor(len(mine["labels"]))
        dist.all_reduce(count)
        parts = [{k: v.tensor_split(MICRO)[n] for k, v in mine.items()} for n in range(MICRO)]
        losses = self.forward_all(model, parts)
        self.backward_all(model, losses, ctx.world_size / count)  # DDP averages


class Buggy(Clean):
    def backward_all(self, model, losses, scale):
        for i in reversed(range(len(losses))):
            arm = i == len(losses) - 1
            with Accelerator.trigger_sync_in_backward(model) if arm else contextlib.nullcontext():
                (losses[i] * scale).backward()


EXPECT = dict(
    right=[
        r"reduc|sync|all.?reduce|trigger|averag",
        r"early|first|before|too soon|last (micro.?batch|index|loss|part)|later|remaining|other (two|micro)|after|rest|only (the )?(one|1|first|last|third)|micro.?batch(es)? (0|1|2|3)|backward(s)? (0|1|2|3)|not (all|every)|order|reversed?|local|two of (the )?three|2 of (the )?3|1 of (the )?3|one of (the )?three",
    ],
    place=[
        r"trigger_sync",
        r"backward_all",
        r"reversed",
        r"micro.?batch",
        r"DDP|DistributedDataParallel|reducer|bucket",
    ],
    wrong=[
        r"(never|not at all) reduced|no (all.?)?reduc\w* (at all|of any)|reduced (twice|again)|counted (twice|two times)",
        r"divisor|own count|mean of means|world.?size (twice|factor)|scale is wrong",
        r"wrong (rows|labels|group)|forward .{0,20}wrong|unused parameter|lost in accumulation",
    ],
)
WHY = (
    "backward_all goes from micro-batch 2 down to 0, but arms DDP's reducer at index 2, that is for the first backward. So DDP averages the gradient of micro-batch 2 alone over the two ranks; the gradients of "
    "micro-batches 1 and 0 are added afterwards on each rank, not reduced and scaled by the world size. All parameters are wrong on both ranks, and the ranks differ. A right cause says that the reduction takes place "
    "before the later backwards, so that only one micro-batch is reduced. Fix: trigger at i == 0, the last backward of the loop."
)
