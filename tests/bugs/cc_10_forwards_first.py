"""A tiny GPT-2 (transformers) under DDP with accelerate: three micro-batches are forwarded first, all under no_sync, and their backwards follow (several losses are compared before the backward); the gradient synchronisation is asked for with
Accelerator.trigger_sync_in_backward, which arms DDP's reducer for the one backward inside its context. The losses are divided by the tokens of all ranks and multiplied by the world size, as DDP averages.

The bug: all three backwards are inside trigger_sync_in_backward. The reducer is armed once, on entry: it reduces in the first backward, and the gradients of the second and third are added locally to the averaged one and never reduced.
After the docstring of accelerate's trigger_sync_in_backward (only the LAST backward is inside) and the forum questions about it.
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, LENGTH, VOCABULARY, MICRO = 11, 6, 17, 3


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=8,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        return GPT2LMHeadModel(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        padding = torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(padding, -100)}

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")
        return loss, (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def backward_all(self, model, losses):
        for loss in losses[:-1]:
            loss.backward()
        with Accelerator.trigger_sync_in_backward(model):
            losses[-1].backward()

    def step(self, model, batch, ctx):
        rows = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        tokens = (rows["labels"] != -100).sum()
        dist.all_reduce(tokens)
        losses = []
        with model.no_sync():
            for n in range(MICRO):
                loss, _ = self.loss_sum(
                    model, {k: v.tensor_split(MICRO)[n] for k, v in rows.items()}
                )
                losses.append(loss * ctx.world_size / tokens)
        self.backward_all(model, losses)


class Buggy(Clean):
    def backward_all(self, model, losses):
        with Accelerator.trigger_sync_in_backward(model):
            for loss in losses:
                loss.backward()


EXPECT = dict(
    right=[
        r"sync|reduc|DDP|averag|all.?reduce",
        r"first (backward|micro)|later|second|third|2nd|3rd|after (the |its |that )?(reduc|sync|all.?reduce|averag|first)|early|too soon|before (the )?(last|other|rest|remaining|final|all)|only (one|the first|part)|local|own|not (all|every)|remaining|last (two|2|micro|backward)|never reduced|not reduced",
    ],
    place=[
        r"backward_all",
        r"trigger_sync_in_backward",
        r"backward",
        r"DDP|DistributedDataParallel|reducer|bucket",
        r"micro",
    ],
    wrong=[
        r"(divisor|denominator|token count).{0,30}wrong|mean of (the )?means",
        r"never synchroni[sz]ed at all|no (all.?reduce|reduction) (at all|ran)",
        r"reduced (twice|three times)|counted twice|wrong rows|labels?.{0,20}shift",
    ],
)
WHY = (
    "trigger_sync_in_backward prepares DDP's reducer once when it is entered, so that the first of the three backwards reduces, and the second and third only add the rank's own gradient (already multiplied by the world size 2) to the average. "
    "Both ranks end with the averaged gradient of micro-batch 0 plus twice their own of micro-batches 1 and 2, unlike between the ranks, for all parameters; losses and divisor are right. A right cause says that the gradients are reduced too early "
    "(after the first micro-batch) so that the later ones are not reduced. Fix: only the last backward inside the context."
)
