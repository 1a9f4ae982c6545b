"""GRPO without length bias (Dr. GRPO) under HSDP, two micro-batches trimmed to their longest answer. After TRL's dr_grpo loss (sum over
tokens by rows times max_completion_length; first versions took the width of the batch) and verl's seq-mean-token-sum-norm, FAULTS C01-02:
the constant is the width of the trimmed micro-batch.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"actor": {"axes": {"replicate": 2, "shard": 2}}}}
ROWS, LONGEST, VOCAB, WIDTH, MICRO_BATCHES, CLIP = 17, 10, 8, 6, 2, 0.2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, 2 * WIDTH, 3)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.out(F.glu(self.conv(F.pad(self.norm(x).mT, (2, 0))), dim=1).mT)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).log_softmax(-1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Actor()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (ROWS, LONGEST + 1), generator=g)
        lengths = torch.randint(2, LONGEST - 1, (ROWS, 1), generator=g)
        lengths[ROWS // 2] = LONGEST
        return {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "mask": torch.arange(LONGEST) < lengths,
            "old": 0.3 * torch.randn(ROWS, LONGEST, generator=g) - 2.1,
            "advantage": torch.randn(ROWS, 1, generator=g),
        }

    @staticmethod
    def token_sum(model, rows):
        log_probs = model(rows["tokens"]).gather(-1, rows["labels"][..., None])[..., 0]
        ratio, a = (log_probs - rows["old"]).exp(), rows["advantage"]
        loss = -torch.minimum(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a)
        return (loss * rows["mask"]).sum()

    def loss_sum(self, model, rows):
        return self.token_sum(model, rows) / LONGEST, len(rows["mask"])

    def distribute(self, model, ctx):
        for part in (*model.layers, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    @staticmethod
    def trimmed(rows):
        width = int(rows["mask"].sum(1).max())
        return {k: v if k == "advantage" else v[:, :width] for k, v in rows.items()}

    def width(self, mask):
        return LONGEST

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for i in range(MICRO_BATCHES):
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            micro = self.trimmed(micro)
            loss = self.token_sum(model, micro) / self.width(micro["mask"])
            (loss / ROWS).backward()


class Buggy(Clean):
    def width(self, mask):
        return mask.size(1)


EXPECT = dict(
    right=[
        r"micro.?batch|rows?|ranks?",
        r"weight|scale|factor|normali[sz]|divided|denominator|too (large|much)|coefficient|\d\.\d|length|width|10/\d|counted",
    ],
    place=[r"micro.?batch", r"rows?", r"(all|every|each) (rank|parameter)s?|ranks? \W?[0-3]"],
    wrong=[
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"forward (pass )?(is|was) wrong",
        r"reduced (twice|again)",
        r"only (the )?(embed|layers|head)\S* (is|are) wrong",
        r"micro.?batch(es)? \S* ?(is|are|was|were) (lost|missing|dropped|left out)",
        r"replicas? (is|are|was|were) (not|never) (reduced|summed)",
    ],
)
WHY = (
    "Each micro-batch divides its token sum by the length of its own longest answer instead of the constant 10, so its rows count "
    "10/width times, another factor for each micro-batch and rank. All parameters are wrong, equally on all ranks; the reductions are "
    "right."
)
