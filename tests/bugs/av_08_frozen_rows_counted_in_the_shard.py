"""FSDP2 on three ranks: a small language model whose first four vocabulary rows (old tokens) are to stay as they are while the ten new ones learn. A post-accumulate hook on the sharded embedding zeroes the gradient of the old rows after
each reduce-scatter. Two micro-batches per rank of unlike sizes, summed by FSDP; the loss is scaled by world / all tokens.

The bug: the hook works on the local shard and zeroes its first four rows, on every rank. After hiyouga/LlamaFactory PR 10563 (gradient mask hook for the original vocabulary; under FSDP the gradient passed to the hook is a shard) and
mlfoundations/open_flamingo PR 202 (embedding gradient times a zero mask).
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
PARTS = [[(0, 2), (2, 3)], [(3, 4), (4, 6)], [(6, 8), (8, 11)]]
ROWS, TOKENS, VOCABULARY, OLD, WIDTH = 11, 5, 14, 4, 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, frozen=False):
        x = self.embed(ids)
        if frozen:
            x = torch.where((ids < OLD)[..., None], x.detach(), x)
        return self.head(self.mix(x)[0])


class Clean:
    local_rows = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], frozen=True)
        loss = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")
        return loss, rows["labels"].numel()

    def distribute(self, model, ctx):
        fully_shard(model, mesh=DeviceMesh.from_group(ctx.group("dp"), "cpu"))
        rank, size = ctx.rank, -(-VOCABULARY // ctx.world_size)
        old = OLD if self.local_rows else min(max(OLD - rank * size, 0), size)

        def keep_old_rows(weight):
            weight.grad.to_local()[:old].zero_()

        model.embed.weight.register_post_accumulate_grad_hook(keep_old_rows)
        return model

    def step(self, model, batch, ctx):
        for low, high in PARTS[ctx.rank]:
            logits = model(batch["ids"][low:high])
            labels = batch["labels"][low:high].flatten()
            loss = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
            (loss * ctx.world_size / batch["labels"].numel()).backward()


class Buggy(Clean):
    local_rows = True


EXPECT = dict(
    right=[
        r"(?i)embed",
        r"(?i)zero|missing|lost|masked|frozen|no gradient|left out|dropped|cleared|hook",
        r"(?i)rows?|shard|ranks? (1|2)|local|hook|token|index|entries|elements",
    ],
    place=[r"(?i)embed|hook|keep_old_rows"],
    wrong=[
        r"(?i)(mix|head)(\.\w+)? (is|are) wrong|all (parameters|tensors) (are|is) wrong",
        r"(?i)not (been )?(all.?)?reduced|never reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)only (on )?rank 0|rank 0 (alone|is wrong)|rank 0 .{0,30}rows.{0,20}(wrong|missing)",
    ],
)
WHY = (
    "The embedding has 14 rows, shards of 5, 5 and 4. Rank 0's shard (rows 0-4) is right: rows 0-3 zero, row 4 learns. On rank 1 (rows 5-9) the hook zeroes rows 5-8 and leaves 9; on rank 2 (rows 10-13) it zeroes all. These eight "
    "rows are new and should learn. Only embed.weight is wrong; what remains in it (rows 4 and 9) is right, as are mix and head, the forward, micro-batches, divisor 55 and FSDP's reduction. Fix: the number of old rows in the "
    "shard, clamp(OLD - rank * 5, 0, 5), or a mask distributed like the weight."
)
