"""Frame classifier of a speech recogniser on a two-stage pipeline (torch.distributed.pipelining, GPipe, three micro-batches): stage 0 is a linear layer and a GRU, stage 1 a second GRU and the head. Features are time first (time x rows x
bins), as the GRUs want them; the last stage turns its output to rows first, since the labels are rows x time. Sum of cross entropies / frames; afterwards every rank gets the other stage's gradients.

The bug: no args_chunk_spec is given, and the schedule cuts the input along dimension 0, which is time, and the target along dimension 0, which is rows. A micro-batch holds three frames of all six rows instead of all nine frames of two
rows; the flattened logits and labels have the same length, so nothing complains. As in pytorch/pytorch PR 148458 (microbatch splitting for dim != 0), pytorch/PiPPy PR 740 (the default is TensorChunkSpec(0)).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2}}}}
ROWS, FRAMES, BINS, WIDTH, PHONES, MICRO = 6, 9, 4, 6, 5, 3


class Lower(nn.Module):
    def __init__(self):
        super().__init__()
        self.front, self.recurrent = nn.Linear(BINS, WIDTH), nn.GRU(WIDTH, WIDTH)

    def forward(self, x):
        return self.recurrent(torch.tanh(self.front(x)))[0]


class Upper(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.head = nn.GRU(WIDTH, WIDTH), nn.Linear(WIDTH, PHONES)

    def forward(self, x):
        return self.head(self.recurrent(x)[0]).transpose(0, 1).contiguous()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([Lower(), Upper()])

    def forward(self, x):
        return self.stages[1](self.stages[0](x))


def frame_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Clean:
    chunks = (TensorChunkSpec(1),)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "sound": torch.randn(ROWS, FRAMES, BINS, generator=g),
            "labels": torch.randint(PHONES, (ROWS, FRAMES), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["sound"].transpose(0, 1))
        return frame_loss(logits, rows["labels"]), rows["labels"].numel()

    def step(self, model, batch, ctx):
        stage = PipelineStage(
            model.stages[ctx.rank], ctx.rank, 2, torch.device("cpu"), group=ctx.group("pp")
        )
        schedule = ScheduleGPipe(
            stage,
            MICRO,
            loss_fn=lambda out, labels: frame_loss(out, labels) / (ROWS * FRAMES),
            args_chunk_spec=self.chunks,
            scale_grads=False,
        )
        if ctx.rank == 0:
            schedule.step(batch["sound"].transpose(0, 1).contiguous())
        else:
            schedule.step(target=batch["labels"])
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, group=ctx.group("pp"))


class Buggy(Clean):
    chunks = None


EXPECT = dict(
    right=[
        r"(?i)input|micro.?batch|chunk|split|\bcut\b|rows?|frames?|time|dimension",
        r"(?i)forward|input|front|stages?[. \[]?0|first stage|chunk|split|\bcut\b|rows?",
        r"(?i)wrong|other|different|differ|not the|instead|mix|along|permut|transpos"
        r"|foreign|layout|deviat",
    ],
    place=[r"(?i)stages?[. \[]?0|first stage|front|input|chunk|micro.?batch|time|rows"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[2-9]\b",
        r"(?i)forward (is|agrees|was) (right|correct)|wrong only in the backward",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
        r"(?i)(only|just) (in )?(the )?(upper|second|last) stage|stage 1 alone",
        r"(?i)gradient .{0,40}(between|across|over) (the )?stages? .{0,20}(wrong|lost"
        r"|detached|scaled)",
    ],
)
WHY = (
    "The default chunk spec cuts dimension 0: micro-batch m gets frames 3m .. 3m+2 of all six rows (time x rows = 3 x 6) instead of all nine frames of rows 2m, 2m+1 (9 x 2), while the target of micro-batch m is rows 2m, 2m+1 with all "
    "frames (2 x 9). So both GRUs start anew every three frames, and the flattened logits (6 rows x 3 frames) meet the labels of (2 rows x 9 frames): 18 each, so no error. Both stages and all three micro-batches are wrong, from the "
    "input of stages.0.front on; gradients of all parameters are wrong in direction on both ranks. Only row 0, frames 0 to 2 (micro-batch 0) and row 5, frames 6 to 8 (micro-batch 2, state begun anew) meet their own labels. Transport "
    "of activations and gradients between stages, divisor 54, and exchange of the gradients are right. Fix: args_chunk_spec=(TensorChunkSpec(1),), or rows first."
)
