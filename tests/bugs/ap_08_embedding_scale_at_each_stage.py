"""Three pipeline stages written by hand, two micro-batches of unlike size, of a small Gemma: token embedding times sqrt(width), then blocks, final norm and head. Each stage runs the same forward function; what a stage does not have is
None. All forwards, then all backwards; loss sum / all tokens; gradients summed over pp.

The bug: the stage's forward multiplies its input by sqrt(width) whether it comes from the embedding or from the stage before. As fixed in NVIDIA-NeMo/Speech (NeMo) PR 8808, Pipeline Parallel for Gemma: "embedding scaling only applies
to the first stage".
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, TOKENS, VOCABULARY, WIDTH = 5, 3, 7, 6
PARTS = [(0, 3), (3, 5)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.mix, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 8),
            nn.Linear(8, WIDTH),
        )

    def forward(self, x):
        seen = self.mix(self.norm(x)).cumsum(1)
        return x + self.down(F.gelu(self.up(seen)))


class Stage(nn.Module):
    def __init__(self, first, last):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if first else None
        self.block = Block()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6) if last else None
        self.head = nn.Linear(WIDTH, VOCABULARY) if last else None
        self.always = False

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        if self.embed is not None or self.always:
            x = x * WIDTH**0.5
        x = self.block(x)
        return x if self.head is None else self.head(self.norm(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(Stage(i == 0, i == 2) for i in range(3))

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x


def token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Clean:
    always = False

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
        return token_loss(model(rows["ids"]), rows["labels"]), rows["labels"].numel()

    def distribute(self, model, ctx):
        for stage in model.stages:
            stage.always = self.always
        return model

    def step(self, model, batch, ctx):
        rank, stage = ctx.rank, model.stages[ctx.rank]
        dtype = stage.block.up.weight.dtype
        kept = []
        for low, high in PARTS:
            if rank == 0:
                x = batch["ids"][low:high]
            else:
                x = torch.empty(high - low, TOKENS, WIDTH, dtype=dtype)
                dist.recv(x, rank - 1)
                x.requires_grad_()
            y = stage(x)
            if rank < 2:
                dist.send(y.detach().contiguous(), rank + 1)
            else:
                y = token_loss(y, batch["labels"][low:high]) / (ROWS * TOKENS)
            kept.append((x, y))
        for x, y in kept:
            if rank < 2:
                grad = torch.empty_like(y)
                dist.recv(grad, rank + 1)
                y.backward(grad)
            else:
                y.backward()
            if rank > 0:
                dist.send(x.grad.contiguous(), rank - 1)
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=ctx.group("pp"))


class Buggy(Clean):
    always = True


EXPECT = dict(
    right=[
        r"(?i)forward|input|activation|output|scale",
        r"(?i)stages?[ .]?(1|2|\[1|one)|rank 1|rank 2|later stages?|second stage|middle stage|between the stages",
        r"(?i)scale|times|factor|multipl|sqrt|2\.4|larger|wrong|differ|other",
    ],
    place=[r"(?i)stages\.[12]|stage [12]|rank [12]|block"],
    wrong=[
        r"(?i)forward is right|wrong only in the backward",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)stages?[ .]?0.{0,25}(forward|output).{0,12}(is )?wrong|embed.{0,20}(forward|output) .{0,15}wrong",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|swapped)|another micro.?batch|only the (first|last) micro.?batch",
        r"(?i)labels? .{0,20}(is|are) (wrong|of another)",
    ],
)
WHY = (
    "Stages 1 and 2 (ranks 1 and 2) multiply the activation received from the stage before by sqrt(6) = 2.449 as if it were an embedding, in both micro-batches and all rows. Stage 0's forward is right (embedding and block); "
    "the forward goes wrong at the input of stages.1.block (x * 2.449), and again at the input of stages.2.block. The RMS norm inside the blocks hides the scale, "
    "the residual path does not. All parameters of all stages get wrong gradients (stage 0 also since the gradient handed back is multiplied by sqrt(6) at each of the two later stages). Hand-over, labels, divisor 15, "
    "micro-batches and the sum over pp are right. Fix: scale only where there is an embedding."
)
