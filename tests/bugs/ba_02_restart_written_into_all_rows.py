"""Fine-tuning of GPT-2 (transformers) on packed rows under DDP on two ranks with two micro-batches each, of three, one, two and two rows. A row holds two or three documents; positions start anew with every document and a block-diagonal
causal mask keeps the documents apart. The divisor is the number of predicted tokens of all ranks.

The bug: the positions are arange(L).expand(rows, L) and the restarts are written in place row by row; the rows of an expanded tensor are the same memory, so every restart lands in all rows of the micro-batch. As in pytorch issue 4664
(in-place operation after expansion) and sgl-project/sglang PR 22634 (position_ids of an expanded view changed in place).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
LENGTH, VOCABULARY, WIDTH = 10, 15, 8
STARTS = [[0, 4], [0, 3, 7], [0, 6], [0, 5], [0, 2, 5], [0, 7], [0, 4, 8], [0, 4, 8]]
PARTS = [[(0, 3), (3, 4)], [(4, 6), (6, 8)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=LENGTH,
                n_embd=WIDTH,
                n_layer=2,
                n_head=2,
                initializer_range=0.3,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                use_cache=False,
                bos_token_id=1,
                eos_token_id=2,
                attn_implementation="eager",
            )
        )

    def forward(self, rows, shared):
        ids, starts = rows["ids"], rows["starts"]
        positions = torch.arange(LENGTH).expand(len(ids), LENGTH)
        if not shared:
            positions = positions.clone()
        for row in range(len(ids)):
            for start in starts[row].nonzero().flatten().tolist():
                positions[row, start:] = torch.arange(LENGTH - start)
        document = starts.cumsum(1)
        see = (document[:, :, None] == document[:, None]) & torch.ones(LENGTH, LENGTH).tril().bool()
        dtype = self.lm.transformer.wte.weight.dtype
        mask = torch.zeros(see.shape, dtype=dtype).masked_fill(~see, torch.finfo(dtype).min)
        logits = self.lm(ids, attention_mask=mask[:, None], position_ids=positions).logits
        return F.cross_entropy(
            logits[:, :-1].flatten(0, 1), rows["labels"][:, 1:].flatten(), reduction="sum"
        )


class Clean:
    shared = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(3, VOCABULARY, (len(STARTS), LENGTH), generator=g)
        starts = torch.zeros(len(STARTS), LENGTH, dtype=torch.long)
        for row, places in enumerate(STARTS):
            starts[row, places] = 1
        return {"ids": ids, "starts": starts, "labels": ids.masked_fill(starts == 1, -100)}

    def loss_sum(self, model, rows):
        return model(rows, False), int((rows["labels"] != -100).sum())

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        tokens = int((batch["labels"] != -100).sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (model(rows, self.shared) * ctx.world_size / tokens).backward()


class Buggy(Clean):
    shared = True


EXPECT = dict(
    right=[
        r"(?i)position|wpe|input|forward",
        r"(?i)position|wpe|other|wrong|differ|foreign|another|restart|same memory|shared|expand",
        r"(?i)rows?|micro.?batch|wpe|position",
    ],
    place=[r"(?i)wpe|position(s|_ids)?"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted twice|too (early|late)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward is right|wrong only in the backward",
        r"(?i)wte.{0,30}(output|forward).{0,15}wrong",
        r"(?i)labels? .{0,20}(is|are) (wrong|shifted)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
    ],
)
WHY = (
    "In the step all rows of a micro-batch share one row of positions (an expanded view), and what is written last wins: the last row begins with a restart at 0, which wipes out the others, so all rows end up with the last row's "
    "positions. Rank 0, micro-batch 0 (rows 0, 1, 2): a restart at 6 alone, right for row 2, wrong for rows 0 (4) and 1 (3, 7). Rank 0, micro-batch 1 (row 3 alone): right. Rank 1, micro-batch 0 (rows 4, 5): both get the positions of "
    "row 5 (restart at 7), wrong for row 4. Rank 1, micro-batch 1 (rows 6, 7): equal restarts, right. So rows 0, 1 (rank 0) and 4 (rank 1) get other positions, those of the last row of their micro-batch. The forward goes wrong at the "
    "input of transformer.wpe; wpe's gradient goes to other positions, all other parameters are wrong in direction, too, equally on both ranks after DDP's average. Ids, mask, labels, divisor, no_sync and reduction are right. Fix: "
    "clone() or repeat() before writing."
)
