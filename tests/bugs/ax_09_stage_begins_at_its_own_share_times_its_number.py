"""Pipeline of three stages with torch.distributed.pipelining (PipelineStage, 1F1B schedule, four micro-batches of two rows): eight residual layers are shared out 3, 3, 2; the first stage has the embedding, the last the norm and
the head. Afterwards the gradients of all stages are summed over the pipeline, a stage giving zero for what it does not have.

The bug: the shares are uneven, but a stage's first layer is found as its number times its own share. For the last stage that is 2 x 2 = 4 instead of 6: layers 4 and 5 are run by two stages, layers 6 and 7 by none. As in
ml-explore/mlx-lm PR 1816 ("the per-rank count is adjusted, but start_idx still multiplies by this rank's own count") and issue 1688.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, TOKENS, VOCABULARY, WIDTH, LAYERS, MICRO = 8, 5, 9, 6, 8, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.mix(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def stage_modules(model, number, stages, own_share):
    shares = [LAYERS // stages + (i < LAYERS % stages) for i in range(stages)]
    first = number * shares[number] if own_share else sum(shares[:number])
    parts = list(model.layers[first : first + shares[number]])
    if number == 0:
        parts.insert(0, model.embed)
    if number == stages - 1:
        parts += [model.norm, model.head]
    return nn.Sequential(*parts)


class Clean:
    own_share = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
            "label": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"]).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["label"].flatten(), reduction="sum")
        return loss, rows["label"].numel()

    def step(self, model, batch, ctx):
        group, stages = ctx.group("pp"), ctx.world_size
        count = batch["label"].numel()

        def loss_of(logits, label):
            loss = F.cross_entropy(logits.flatten(0, 1), label.flatten(), reduction="sum")
            return loss / count

        part = stage_modules(model, ctx.rank, stages, self.own_share)
        stage = PipelineStage(part, ctx.rank, stages, torch.device("cpu"), group=group)
        schedule = Schedule1F1B(stage, MICRO, loss_fn=loss_of, scale_grads=False)
        if ctx.rank == 0:
            schedule.step(batch["ids"])
        elif ctx.rank == stages - 1:
            schedule.step(target=batch["label"])
        else:
            schedule.step()
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    own_share = True


EXPECT = dict(
    right=[
        r"(?i)layers?\W{0,3}(\[)?[4-7]|layers [4-7]",
        r"(?i)twice|again|two stages|both stages|second time|repeat|skip|never (run|used|"
        r"called|reached)|not (run|used|called)|"
        r"zero|no gradient|missing|left out|forward|input|other|instead",
    ],
    place=[r"(?i)layers?\W{0,3}[4-7]|last stage|rank 2|stage 2"],
    wrong=[
        r"(?i)forward is right|wrong only in the backward",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed over the ranks) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten|mixed|swapped)",
        r"(?i)layers?\W{0,3}[0-3]\b.{0,30}(goes|run|runs) (wrong|twice)|embed.{0,20}goes wrong",
        r"(?i)wrong micro.?batch|labels? .{0,20}(is|are) wrong",
    ],
)
WHY = (
    "Shares 3, 3, 2. Stage 0: layers 0-2, stage 1: layers 3-5 (1 x 3), both right. Stage 2 begins at 2 x 2 = 4 and runs layers 4 and 5 (its own copies) instead of 6 and 7. So the forward goes wrong on the last stage (rank 2) "
    "at its first layer, for all micro-batches and rows; what it receives is right. After the sum over the pipeline, layers.4 and layers.5 have the gradient of both uses, layers.6 and layers.7 zero on all ranks; embed, "
    "layers.0-3, norm and head have the gradient of the wrong net. The schedule, the loss with its divisor 40, the micro-batches and the final sum are right. Fix: first = sum of the shares of the earlier stages."
)
