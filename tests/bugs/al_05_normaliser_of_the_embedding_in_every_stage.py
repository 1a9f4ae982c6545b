"""A language model in the manner of Gemma (embeddings are multiplied by the square root of the width) in a pipeline of three stages with torch.distributed.pipelining (PipelineStage, Schedule1F1B, four micro-batches of two rows). A stage
is a part of the model: the first has the embedding, the last the final norm and the head, the blocks are shared out 2, 1, 2.

The bug: the forward common to all stages multiplies what it starts from by the normaliser, be it the embeddings or the hidden states of the stage before. As in NVIDIA-NeMo/Speech PR 8808 (pipeline parallel for Gemma: embedding scaling
belongs to the first stage only), compare vllm-project/vllm PR 35094.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, TOKENS, VOCABULARY, WIDTH, MICRO = 8, 5, 11, 6, 4
SHARES = [(0, 2), (2, 3), (3, 5)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(TOKENS, TOKENS)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        h = h + torch.tanh(self.mix(h.transpose(1, 2))).transpose(1, 2)
        return x + self.down(F.gelu(self.up(h)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(SHARES[-1][1]))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids) * WIDTH**0.5
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Part(nn.Module):
    """The modules of one stage; the parameters are those of the whole model."""

    def __init__(self, net, number, everywhere):
        super().__init__()
        low, high = SHARES[number]
        self.embed = net.embed if number == 0 else None
        self.blocks = net.blocks[low:high]
        last = number == len(SHARES) - 1
        self.norm, self.head = (net.norm, net.head) if last else (None, None)
        self.everywhere = everywhere

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        if self.embed is not None or self.everywhere:
            x = x * WIDTH**0.5
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


class Clean:
    everywhere = False

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
        logits = model(rows["ids"])
        return F.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum"
        ), rows["labels"].numel()

    def step(self, model, batch, ctx):
        def loss(logits, labels):
            total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            return total / (ROWS * TOKENS)

        group, stages = ctx.group("pp"), len(SHARES)
        number = dist.get_rank(group)
        part = Part(model, number, self.everywhere)
        stage = PipelineStage(part, number, stages, torch.device("cpu"), group=group)
        schedule = Schedule1F1B(stage, MICRO, loss_fn=loss, scale_grads=False)
        if number == 0:
            schedule.step(batch["ids"])
        elif number == stages - 1:
            schedule.step(target=batch["labels"])
        else:
            schedule.step()
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    everywhere = True


EXPECT = dict(
    right=[
        r"(?i)forward|input|activation|hidden|output|receiv|start|enter",
        r"(?i)rank 1|ranks? \[?1, ?2|stage 1|stages? (1 and 2|behind|after)|second stage"
        r"|blocks?[.\[ ]?2|not (on )?(rank|stage) 0"
        r"|later stages?|middle stage",
        r"(?i)wrong|differ|scal|multipl|factor|sqrt|2\.449|normali[sz]er|too large|times",
    ],
    place=[r"(?i)stage|rank|blocks?[.\[ ]?2|input|forward|hidden"],
    wrong=[
        r"(?i)forward is right|wrong only in the backward|backward goes wrong first",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)"
        r"|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|number of micro",
        r"(?i)only (the )?(first|last) micro.?batch|micro.?batch(es)? .{0,20}(lost|dropped"
        r"|overwritten|mixed)",
        r"(?i)(embed|embedding)('s)? (output|forward) (is|goes) wrong"
        r"|rank 0('s forward)? goes wrong",
        r"(?i)(other|wrong) (rows|labels|micro.?batch)|detach",
    ],
)
WHY = (
    "Stage 0 (rank 0) is right in the forward: the embedding times sqrt(6). Stages 1 and 2 multiply the hidden states they receive by sqrt(6) = 2.449 again, for all rows and micro-batches: the forward goes wrong on rank 1 at the "
    "input of blocks.2, is carried on, and goes wrong anew on rank 2 at the input of blocks.3. The first thing of the block is a norm, which hides the factor, but the residual stream is 2.449 times as large against what the blocks "
    "add. The gradients of all parameters are wrong (those of stages 1 and 2 by the wrong forward, those of stage 0 also by the factor on the way back). The schedule, its micro-batches, the transport, the divisor 40 and the sum of "
    "the parameter gradients over pp are right. Fix: normaliser only where the embedding is."
)
