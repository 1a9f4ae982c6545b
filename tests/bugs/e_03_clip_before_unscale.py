"""A CTC speech model with a loss scaler and two micro-batches. After Lightning PR 9606, milesial/Pytorch-UNet
issue 468 and waifu-diffusion issue 64 ("clip_grad_norm applied to scaled gradients").
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"asr": {"axes": {"dp": 3}}}}
ROWS, FRAMES, BANDS, SYMBOLS, LONGEST = 11, 22, 5, 7, 4
SCALE, MAX_NORM, MICRO_BATCHES = 4096.0, 100.0, 2


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(BANDS, 9, 3, stride=2, padding=1)
        self.rnn = nn.GRU(9, 8, num_layers=2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, SYMBOLS)

    def forward(self, x):
        x = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.head(self.norm(self.rnn(x)[0])).log_softmax(-1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Recogniser()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        frames = torch.randint(18, FRAMES + 1, (ROWS,), generator=g)
        x = torch.randn(ROWS, FRAMES, BANDS, generator=g)
        return {
            "x": x * (torch.arange(FRAMES) < frames[:, None])[..., None],
            "frames": frames,
            "y": torch.randint(1, SYMBOLS, (ROWS, LONGEST), generator=g),
            "symbols": torch.randint(1, LONGEST + 1, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logp = model(rows["x"]).transpose(0, 1)
        loss = F.ctc_loss(
            logp, rows["y"], (rows["frames"] + 1) // 2, rows["symbols"], reduction="sum"
        )
        return loss, rows["symbols"].sum()

    def finish(self, params):
        for param in params:
            param.grad.div_(SCALE)
        nn.utils.clip_grad_norm_(params, MAX_NORM)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = mine["symbols"].sum()
        dist.all_reduce(count)
        for i in range(MICRO_BATCHES):
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            (SCALE * self.loss_sum(model, micro)[0] / count).backward()
        params = list(model.parameters())
        for param in params:
            dist.all_reduce(param.grad)
        self.finish(params)


class Buggy(Clean):
    def finish(self, params):
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        for param in params:
            param.grad.div_(SCALE)


EXPECT = dict(
    right=[
        r"clip|global norm|grad(ient)?.?norm|max.?norm",
        r"scal|factor|times|before|order|too early",
    ],
    place=[r"\b(all|every|each|whole|same|common|one|global)\b", r"param|gradient"],
    wrong=[
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"(reduced|counted) (twice|again)",
        r"mean of (the )?means",
        r"(norm|clip\w*) .{0,30}(shard|own rank|local|each rank|per.?rank)",
        r"rows? .{0,20}(missing|lost|dropped)",
    ],
)
WHY = (
    "The gradients are clipped while they are still multiplied by the loss scale 4096: their norm exceeds 100, so all are multiplied "
    "by 100 / (4096 |g|), the same factor below 1 on all parameters and ranks. After unscaling the true norm is below 100 and no "
    "clipping would have happened."
)
